"""Exact errors of the formats that round each element by itself, or by one scale for the whole tensor.

What such a format does to an element depends on the element's value only. A bf16 or fp16 tensor of any size has at most
65,536 distinct values, so it is enough to quantise each value once and to weigh it by how often it occurs: exact, and
hundreds of times cheaper than quantising the tensor. Wider dtypes are gone through in chunks, every element once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.analysis.format_errors import FormatError, Treatment, pow2_scale
from megatron.quantscope.formats import Format, bit_pattern_counts, fake_quantize
from megatron.quantscope.formats.patterns import PATTERN_DTYPES, PATTERNS
from megatron.quantscope.formats.scales import as_float32

_CHUNK = 1 << 18  # elements of a wide dtype at a time
_NEGATIVE_ZERO = PATTERNS // 2


@dataclass(frozen=True)
class WeightedValues:
    """Finite values and how often each occurs.

    Attributes:
        values: [n] in the tensor's dtype; of bf16 and fp16 ascending and distinct.
        counts: [n].
    """

    values: Tensor
    counts: npt.NDArray[np.int64]


def weighted_values(tensor: Tensor) -> Iterator[WeightedValues]:
    """The finite elements of a floating-point tensor: one batch for bf16 and fp16, else a batch a chunk."""
    if tensor.dtype in PATTERN_DTYPES:
        yield values_of_patterns(bit_pattern_counts(tensor), tensor.dtype)
        return
    for chunk in torch.split(tensor.detach().reshape(-1), _CHUNK):
        finite = chunk[torch.isfinite(chunk)]
        yield WeightedValues(finite, np.ones(len(finite), dtype=np.int64))


def values_of_patterns(counts: npt.NDArray[np.int64], dtype: torch.dtype) -> WeightedValues:
    """The finite values of a bf16 or fp16 tensor, ascending, from the counts of its 65,536 bit patterns."""
    # Sign and magnitude: the negative half ascends when it is read backwards.
    order = np.concatenate([np.arange(PATTERNS - 1, _NEGATIVE_ZERO - 1, -1), np.arange(_NEGATIVE_ZERO)])
    present = order[counts[order] > 0]
    values = torch.from_numpy(present.astype(np.uint16).view(np.int16)).view(dtype)
    finite = torch.isfinite(values)
    return WeightedValues(values[finite], counts[present[finite.numpy()]])


def element_errors(
    batches: Iterable[WeightedValues], amax: float, treatments: Iterable[Treatment]
) -> dict[str, FormatError]:
    """The errors of treatments that know no blocks.

    Args:
        batches: The finite values of a tensor.
        amax: Largest magnitude among all of them; of a shard, in the shard.
        treatments: What to try; formats with block scales are left out.
    """
    tried = [treatment for treatment in treatments if treatment.format.block is None]
    errors = {treatment.name: FormatError() for treatment in tried}
    for batch in batches:
        x = batch.values.double().numpy()
        for treatment in tried:
            errors[treatment.name] += _error(batch, x, amax, treatment)
    return errors


def _error(batch: WeightedValues, x: npt.NDArray[np.float64], amax: float, treatment: Treatment) -> FormatError:
    fmt = treatment.format
    if fmt.is_identity_for(batch.values.dtype):
        return FormatError()
    scale = pow2_scale(amax, fmt.full_precision_max) if treatment.scaled else 1.0
    q = _quantized(batch.values, fmt, scale, amax).double().numpy()
    kept = np.isfinite(q)
    difference = np.where(kept, x - q, 0.0)
    largest = amax if fmt.scale == "fp32" else fmt.max / scale  # a scale for the tensor puts amax onto max
    return FormatError(
        error_squares=float(np.dot(difference * difference, batch.counts)),
        underflow=int(batch.counts[(q == 0) & (x != 0)].sum()),
        saturated=int(batch.counts[kept & (np.abs(x) > largest)].sum()),
        lost=int(batch.counts[~kept].sum()),
    )


def _quantized(values: Tensor, fmt: Format, scale: float, amax: float) -> Tensor:
    if scale == 1.0:
        return fake_quantize(as_float32(values), fmt, amax=torch.tensor(amax))
    wide = values.float() if values.dtype == torch.float16 else values  # fp16 has no room for the factor
    scaled = wide * scale
    return fake_quantize(scaled, fmt, out=scaled).div_(scale)
