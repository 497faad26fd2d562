"""The summary of one tensor: everything that the figures know about it.

Counts and sums are exact and merge by adding (`TensorStatistics`, `FormatError`, the block counts); quantiles and
channel maxima describe this one tensor. All of it comes from a handful of reads by kernels that stay in the cache: a
bf16 tensor of 400,000 elements costs about 6 ns an element with both rules and both uses of one MX format, and 21 ns
with everything that can be tried. Without a C++ compiler torch finds the same numbers, more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.analysis.blocks import BlockSummary, summarize_blocks
from megatron.quantscope.analysis.channels import channel_amax
from megatron.quantscope.analysis.distribution import Distribution, distribution_of
from megatron.quantscope.analysis.format_errors import FormatError, Treatment, as_scaled
from megatron.quantscope.analysis.roles import Role
from megatron.quantscope.formats import TensorStatistics, measure, measure_formats
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.formats.damage import FormatDamage
from megatron.quantscope.formats.job import FLOAT_DTYPES

_PART = 1 << 20  # elements
_Cut = tuple[Tensor, int]  # an operand as its GEMM is given it, and the axis along which blocks run


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """What is known of one tensor.

    Attributes:
        statistics: Counts, sums, extremes and exponents.
        distribution: Quantiles, largest magnitudes, kurtosis.
        channel_amax: [channels]: largest |x| of each channel.
        blocks: Counts in blocks of 32, by use; those of the first use have depths too. () for integers and booleans.
            How many are not all zeros is known of the blocks of every treatment.
        errors: Name of a treatment -> what it does to this tensor.
    """

    statistics: TensorStatistics
    distribution: Distribution
    channel_amax: npt.NDArray[np.float32]
    blocks: tuple[BlockSummary, ...]
    errors: dict[str, FormatError]


def summarize(
    tensor: Tensor, role: Role, *, treatments: Sequence[Treatment], head_dim: int | None = None
) -> TensorSummary:
    """Go through a tensor of any real dtype and shape.

    Args:
        tensor: The tensor, on the CPU.
        role: What it is to its GEMMs: where blocks run.
        treatments: What to try on it; those of a use that it has not are left out, and on integers and booleans
            nothing is tried.
        head_dim: Features of an attention head, if they are known.

    Raises:
        TypeError: The dtype has no real values.
    """
    statistics = measure(tensor)
    x = as_measurable(tensor) if tensor.is_floating_point() else tensor.detach()
    cuts = [use.view(x, head_dim) for use in role.cuts] if tensor.is_floating_point() else []
    sizes = {block for treatment in treatments if (block := treatment.record.block)}
    return TensorSummary(
        statistics=statistics,
        distribution=distribution_of(x),
        channel_amax=channel_amax(x),
        blocks=tuple(summarize_blocks(*cut, depths=use == 0, sizes=sizes) for use, cut in enumerate(cuts)),
        errors=dict(_errors(cuts, statistics, treatments)),
    )


def as_measurable(tensor: Tensor) -> Tensor:
    """The same values in a dtype that can be computed with: FP8 as bf16 (exact), integers as float64."""
    x = tensor.detach()
    if x.dtype in FLOAT_DTYPES:
        return x
    return x.to(torch.bfloat16) if x.is_floating_point() and x.element_size() == 1 else x.to(torch.float64)


def _errors(
    cuts: Sequence[_Cut], statistics: TensorStatistics, treatments: Sequence[Treatment]
) -> Iterator[tuple[str, FormatError]]:
    for use, (x, axis) in enumerate(cuts):
        mine = [treatment for treatment in treatments if treatment.use == use]
        changing = [treatment for treatment in mine if not treatment.record.is_identity_for(x.dtype)]
        plain = [treatment for treatment in changing if not treatment.scaled]
        found = measure_formats(x, [(treatment.format, treatment.scale_rule) for treatment in plain], axis=axis)
        errors = {treatment.name: FormatError.of(damage) for treatment, damage in zip(plain, found, strict=True)}
        for treatment in changing:
            if treatment.scaled:
                errors[treatment.name] = _scaled_error(x, axis, statistics, treatment)
        yield from ((treatment.name, errors.get(treatment.name, FormatError())) for treatment in mine)


def _scaled_error(x: Tensor, axis: int, statistics: TensorStatistics, treatment: Treatment) -> FormatError:
    """Of a scaled treatment, whose format has no blocks: part by part, since each part is multiplied into a copy."""
    damages, scale = [], 1.0
    for part, along in _parts(x, axis):
        scaled, scale = as_scaled(part, treatment, statistics)
        damages += measure_formats(scaled, [(treatment.format, treatment.scale_rule)], axis=along)
    counted = {name: reduce(add, (getattr(damage, name) for damage in damages)) for name in vars(damages[0])}
    return FormatError.of(FormatDamage(**counted), scale)


def _parts(x: Tensor, axis: int) -> Iterator[_Cut]:
    """Views of about `_PART` elements that together are the tensor, none of which cuts a block of 32 in two."""
    rows = x.flatten(0, axis - 1) if axis else x if x.dim() else x.unsqueeze(0)
    unit = 1 if axis else MX_BLOCK
    of_row = max(1, rows.numel() // max(1, len(rows)))
    for part in torch.split(rows, max(1, _PART // (of_row * unit)) * unit):
        yield part, min(axis, 1)
