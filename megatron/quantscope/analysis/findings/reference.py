"""What a format does to Gaussian data: the yardstick for what it does to a tensor.

Every MX format saturates some and MXFP4 makes nine of a hundred elements zero of any data, so such numbers say nothing
by themselves. A tensor whose numbers are a multiple of these has outliers, or too wide a range within its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from megatron.quantscope.formats import measure_format

_SHAPE = (512, 128)  # enough that its percentages move by hundredths from seed to seed


@dataclass(frozen=True)
class GaussianFigures:
    """Percent of the elements of a standard normal tensor that a format makes zero, and that it clips."""

    underflow_percent: float
    saturated_percent: float


@cache
def gaussian(name: str) -> GaussianFigures:
    """The figures of a format, along its block axis and with its default scale."""
    generator = torch.Generator().manual_seed(0)
    found = measure_format(torch.randn(_SHAPE, generator=generator), name, backend="torch")
    count = found.tensor.count
    return GaussianFigures(100 * found.underflow / count, 100 * found.saturated / count)
