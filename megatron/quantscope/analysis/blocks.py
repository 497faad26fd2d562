"""Exact errors of the MX formats, for all of them at once, from one count of a tensor.

The scale of an MX block follows from E, the exponent of its amax, alone (OCP's floor rule), and an element is rounded
relative to that scale. So what becomes of an element depends on three small integers: E, how many binades d the element
lies below the amax, and its fraction m; and E only multiplies: the error of (E, d, m) is 2^E times that of (0, d, m).
Counting the triples once (a bincount, ~4 ns an element) gives error, underflow and saturation of every MX format by a
product with that format's table over (d, m), which `fake_quantize` itself fills in. Quantising instead takes ~35 ns an
element and format.

The counts also are the block-scale histogram (over E) and the exponents as they stand inside a block (over d).

Blocks outside that regularity are few and go their own way: those with a NaN or Inf are lost whole; those with an amax
below 2^-63, where scales and subnormals run out of range, are quantised. So is every block of fp32 and fp64 tensors,
whose fractions are too many to count. Elements 63 binades below their block's amax and smaller count as underflow
without error: what they would add is 2^-126 of the block's signal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.analysis.format_errors import FormatError
from megatron.quantscope.formats import Format, fake_quantize, get_format
from megatron.quantscope.formats.catalog import MX_BLOCK

DEPTHS = 64  # binades below the block's amax that are told apart; the last one takes all that is smaller
_FIELD_BIAS = 127  # of the exponent fields of bf16 and float32
_FIELD_NONFINITE = 255
_FIELD_REGULAR = 64  # smallest field of an amax whose block is regular
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
_FLOAT32_MANTISSA_BITS = 23
_CHUNK_BLOCKS = 1 << 13
_DIRECT_BLOCKS = 1 << 14

Integers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class BlockSummary:
    """What block-scaled formats do to a tensor.

    Attributes:
        amax_exponents: floor(log2 amax) of the blocks that are finite and not all zero -> how many. The E8M0 scale of
            a format is this less the format's emax.
        depths: [DEPTHS]: non-zero elements by binades below their block's amax.
        errors: Format name -> its error.
    """

    amax_exponents: dict[int, int]
    depths: Integers
    errors: dict[str, FormatError]


def summarize_blocks(tensor: Tensor, axis: int, formats: Sequence[Format]) -> BlockSummary:
    """Count a floating-point tensor in blocks of 32 along `axis`, and derive the errors of MX formats from the counts.

    Args:
        tensor: Any shape; a last block that is not full is a short block.
        axis: Dimension along which blocks run.
        formats: Formats with E8M0 scales.
    """
    total = _Total(formats)
    if tensor.numel():
        rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().movedim(axis, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        step = max(1, _CHUNK_BLOCKS * MX_BLOCK // rows.shape[1])
        for part in torch.split(rows, step):
            for add in _contributions(part):
                add.into(total)
    return BlockSummary(dict(sorted(total.amax_exponents.items())), total.depths, total.errors)


class _Total:
    """Sums over the parts of a tensor."""

    def __init__(self, formats: Sequence[Format]) -> None:
        self.amax_exponents: dict[int, int] = {}
        self.depths: Integers = np.zeros(DEPTHS, dtype=np.int64)
        self.errors = {fmt.name: FormatError() for fmt in formats}

    def add_exponents(self, exponents: npt.NDArray[np.integer]) -> None:
        for exponent, count in zip(*np.unique(exponents, return_counts=True), strict=True):
            self.amax_exponents[int(exponent)] = self.amax_exponents.get(int(exponent), 0) + int(count)


@dataclass(frozen=True)
class _Lost:
    """Blocks with a NaN or Inf: `finite` of their elements were finite."""

    finite: int

    def into(self, total: _Total) -> None:
        for name, error in total.errors.items():
            total.errors[name] = error + FormatError(lost=self.finite)


@dataclass(frozen=True)
class _Regular:
    """Blocks whose errors follow from counts: magnitudes [blocks, 32] as bits, without sign."""

    magnitudes: Rows
    mantissa_bits: int

    def into(self, total: _Total) -> None:
        fields = (self.magnitudes.max(axis=1) >> self.mantissa_bits).astype(np.int32)
        total.add_exponents(fields - _FIELD_BIAS)
        smallest, counts = _count_triples(self.magnitudes, fields, self.mantissa_bits)
        zeros = self.magnitudes.size - int(
            np.count_nonzero(self.magnitudes)
        )  # they fell into the deepest bin, fraction 0
        depths = counts.sum(axis=(0, 2))
        depths[-1] -= zeros
        total.depths += depths
        weights = np.ldexp(1.0, 2 * (np.arange(len(counts)) + smallest - _FIELD_BIAS))
        by_pair = counts.sum(axis=0)
        for name, error in total.errors.items():
            table = _pair_table(name, self.mantissa_bits)
            total.errors[name] = error + FormatError(
                error_squares=float(weights @ (counts.reshape(len(counts), -1) @ table.error_squares.ravel())),
                underflow=int(by_pair[table.underflow].sum()) - zeros,
                saturated=int(by_pair[table.saturated].sum()),
            )


@dataclass(frozen=True)
class _Direct:
    """Finite blocks [blocks, 32] that are quantised one by one; padding is zero."""

    blocks: Tensor

    def into(self, total: _Total) -> None:
        for part in torch.split(self.blocks, _DIRECT_BLOCKS):
            x = part.double().numpy()
            amax = np.abs(x).max(axis=1, keepdims=True)
            used = amax[:, 0] > 0
            exponent = np.frexp(amax)[1] - 1
            total.add_exponents(exponent[used, 0])
            nonzero = x != 0
            depth = np.minimum(exponent - (np.frexp(x)[1] - 1), DEPTHS - 1)[nonzero]
            total.depths += np.bincount(depth, minlength=DEPTHS)
            for name, error in total.errors.items():
                fmt = get_format(name)
                q = fake_quantize(part, fmt).double().numpy()
                largest = np.ldexp(fmt.max, np.clip(exponent - fmt.emax, -_FIELD_BIAS, _FIELD_BIAS))
                total.errors[name] = error + FormatError(
                    error_squares=float(np.square(x - q).sum()),
                    underflow=int(np.count_nonzero(nonzero & (q == 0))),
                    saturated=int(np.count_nonzero(np.abs(x) > largest)),
                )


def _contributions(rows: Tensor) -> Iterator[_Lost | _Regular | _Direct]:
    """Sort the blocks of `rows` [rows, length] by how their errors are found."""
    length = rows.shape[1]
    padding = -length % MX_BLOCK
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    blocks = rows.reshape(-1, MX_BLOCK)
    mantissa_bits = _MANTISSA_BITS.get(blocks.dtype)
    if mantissa_bits is None:
        finite = torch.isfinite(blocks).all(dim=1)
        fields = None
    else:
        magnitudes = _magnitudes(blocks)
        fields = magnitudes.max(axis=1) >> mantissa_bits
        finite = torch.from_numpy(fields < _FIELD_NONFINITE)
    if not bool(finite.all()):
        padded = int((~finite).reshape(-1, (length + padding) // MX_BLOCK)[:, -1].sum()) * padding
        yield _Lost(int(torch.isfinite(blocks[~finite]).sum()) - padded)
    if mantissa_bits is None or fields is None:
        yield _Direct(blocks[finite])
        return
    regular = (fields >= _FIELD_REGULAR) & (fields < _FIELD_NONFINITE)
    everything = bool(regular.all())
    if regular.any():
        yield _Regular(magnitudes if everything else magnitudes[regular], mantissa_bits)
    if not everything:
        rest = finite & torch.from_numpy(~regular)
        yield _Direct(blocks[rest][(blocks[rest] != 0).any(dim=1)])


def _magnitudes(blocks: Tensor) -> Rows:
    """The bits of |x|: of bf16 as they are; of fp16 those of the same value in float32, less the fraction's zeros."""
    if blocks.dtype == torch.bfloat16:
        return blocks.contiguous().view(torch.int16).numpy().view(np.uint16) & np.uint16(0x7FFF)
    wide = blocks.float().contiguous().view(torch.int32).numpy() & np.int32(0x7FFFFFFF)
    return (wide >> (_FLOAT32_MANTISSA_BITS - _MANTISSA_BITS[blocks.dtype])).view(np.uint32)


def _count_triples(magnitudes: Rows, fields: npt.NDArray[np.int32], mantissa_bits: int) -> tuple[int, Integers]:
    """The smallest field of a block's amax, and the counts [fields from there, DEPTHS, 2^mantissa_bits]."""
    smallest, fractions = int(fields.min()), 1 << mantissa_bits
    bits = magnitudes.astype(np.int32)
    index = fields[:, None] - (bits >> mantissa_bits)
    np.minimum(index, DEPTHS - 1, out=index)
    index += ((fields - smallest) * DEPTHS)[:, None]
    index <<= mantissa_bits
    index += bits & (fractions - 1)
    shape = (int(fields.max()) - smallest + 1, DEPTHS, fractions)
    return smallest, np.bincount(index.ravel(), minlength=int(np.prod(shape))).reshape(shape)


@dataclass(frozen=True)
class _PairTable:
    """What a format does to 2^-depth * 1.fraction in a block whose amax lies in [1, 2): arrays [DEPTHS, fractions]."""

    error_squares: npt.NDArray[np.float64]
    underflow: npt.NDArray[np.bool_]
    saturated: npt.NDArray[np.bool_]


@cache
def _pair_table(name: str, mantissa_bits: int) -> _PairTable:
    fmt = get_format(name)
    fraction = 1 + torch.arange(1 << mantissa_bits) / (1 << mantissa_bits)
    values = fraction * torch.exp2(-torch.arange(DEPTHS, dtype=torch.float32)).unsqueeze(1)
    anchored = torch.stack([torch.ones(values.numel()), values.flatten()], dim=1)  # the one sets the block's scale
    q = fake_quantize(anchored, fmt)[:, 1].reshape(values.shape).double().numpy()
    x = values.double().numpy()
    error_squares = np.square(x - q)
    error_squares[-1] = 0.0  # this depth holds all that is smaller, and the zeros
    underflow = q == 0
    underflow[-1] = True
    return _PairTable(error_squares, underflow, x > np.ldexp(fmt.max, -fmt.emax))
