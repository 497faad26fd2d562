"""The summary of one tensor: everything that the figures know about it, from one pass.

Counts and sums are exact and merge by adding (`TensorStatistics`, `FormatError`, the block counts); quantiles and
channel maxima describe this one tensor. A bf16 tensor of n elements costs about 12 ns an element for all formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.analysis.blocks import BlockSummary, summarize_blocks
from megatron.quantscope.analysis.channels import channel_amax
from megatron.quantscope.analysis.distribution import Distribution, distribution_of
from megatron.quantscope.analysis.elementwise import WeightedValues, element_errors, weighted_values
from megatron.quantscope.analysis.format_errors import FormatError, Treatment
from megatron.quantscope.formats import TensorStatistics, measure, measure_format
from megatron.quantscope.formats.job import FLOAT_DTYPES
from megatron.quantscope.formats.patterns import PATTERN_DTYPES

_E8M0 = "e8m0"


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """What is known of one tensor.

    Attributes:
        statistics: Counts, sums, extremes and exponents.
        distribution: Quantiles, largest magnitudes, kurtosis.
        channel_amax: [channels]: largest |x| of each channel.
        blocks: Counts in blocks of 32 along the contraction axis; None for tensors that are not floating-point.
        errors: Name of a treatment -> what it does to this tensor.
    """

    statistics: TensorStatistics
    distribution: Distribution
    channel_amax: npt.NDArray[np.float32]
    blocks: BlockSummary | None
    errors: dict[str, FormatError]


def summarize(tensor: Tensor, *, axis: int, treatments: tuple[Treatment, ...]) -> TensorSummary:
    """Go through a tensor of any real dtype and shape.

    Args:
        tensor: The tensor, on the CPU.
        axis: The contraction axis of its GEMM: where blocks run.
        treatments: What to try on it; nothing is tried on integers and booleans.

    Raises:
        TypeError: The dtype has no real values.
    """
    statistics = measure(tensor)
    x = as_measurable(tensor)
    axis = axis if -x.dim() <= axis < x.dim() else -1
    batches = list(weighted_values(x)) if x.dtype in PATTERN_DTYPES else None
    quantizable = tensor.is_floating_point()
    blocks = _blocks(x, axis, treatments) if quantizable else None
    return TensorSummary(
        statistics=statistics,
        distribution=distribution_of(x, batches[0] if batches else None),
        channel_amax=channel_amax(x),
        blocks=blocks,
        errors=_errors(x, axis, statistics.amax, treatments, batches, blocks) if blocks else {},
    )


def as_measurable(tensor: Tensor) -> Tensor:
    """The same values in a dtype that can be computed with: FP8 as bf16 (exact), integers as float64."""
    x = tensor.detach()
    if x.dtype in FLOAT_DTYPES:
        return x
    return x.to(torch.bfloat16) if x.is_floating_point() and x.element_size() == 1 else x.to(torch.float64)


def _blocks(x: Tensor, axis: int, treatments: tuple[Treatment, ...]) -> BlockSummary:
    return summarize_blocks(x, axis, [treatment.format for treatment in treatments if treatment.format.scale == _E8M0])


def _errors(
    x: Tensor,
    axis: int,
    amax: float | None,
    treatments: tuple[Treatment, ...],
    batches: list[WeightedValues] | None,
    blocks: BlockSummary,
) -> dict[str, FormatError]:
    errors = element_errors(weighted_values(x) if batches is None else batches, amax or 0.0, treatments) | blocks.errors
    for treatment in treatments:
        if treatment.name not in errors:
            errors[treatment.name] = _measured_error(x, axis, treatment)
    return errors


def _measured_error(x: Tensor, axis: int, treatment: Treatment) -> FormatError:
    """The error of a format that no count gives: by quantising."""
    found = measure_format(x, treatment.format, axis=axis)
    return FormatError(
        error_squares=found.error_squares, underflow=found.underflow, saturated=found.saturated, lost=found.lost
    )
