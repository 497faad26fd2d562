"""How far a tensor is from its partner, in one pass over both and float64 throughout.

    SQNR          10 log10(sum r^2 / sum (x - r)^2), in dB, r being the baseline's tensor
    cosine        sum x r / sqrt(sum x^2 sum r^2)
    relative L2   sqrt(sum (x - r)^2 / sum r^2)
    max error     max |x - r|

| case | equal | SQNR | cosine | relative L2 | max error |
|---|---|---|---|---|---|
| the same bits, whatever they hold; nothing at all | yes | inf | 1 | 0 | 0 |
| the same values: +0 and -0, one dtype and another | no | inf | 1 | 0 | 0 |
| r is zero throughout, x is not | no | -inf | NaN | inf | as it is |
| x is zero throughout, r is not | no | 0 | NaN | 1 | as it is |
| an element is *lost* | no | -inf | NaN | inf | inf |

Elements that are NaN in both, or the same infinity in both, agree: they are left out of the sums. An element that is
not finite in one only, or not finite in another way, is lost: its error has no bound.

The tensors stay mapped. A chunk of each is widened into a buffer of float64, where five passes run over the cache: 1.5
to 2 ns a pair of bf16 elements on one core. Equal tensors are found by comparing bits, and cost a read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 17  # elements: two buffers of 1 MB
_WORD = 8  # bytes
_SAFE_EXPONENT = 500  # squares of magnitudes up to 2 to this stay in float64's range, and down to minus this
_WIDE_DTYPES = (torch.float64, torch.complex128)


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What the module's docstring defines; `count` is the elements of the tensor."""

    equal: bool
    sqnr_db: float
    cosine: float
    relative_l2: float
    max_error: float
    count: int


def equal_measures(count: int) -> Measures:
    """Of two tensors with the same bits."""
    return Measures(equal=True, sqnr_db=math.inf, cosine=1.0, relative_l2=0.0, max_error=0.0, count=count)


def measure_pair(x: Tensor, reference: Tensor, *, scale: float = 1.0, reference_scale: float = 1.0) -> Measures:
    """Compare two CPU tensors of one shape.

    Args:
        x: Of any dtype that float64 can hold; complex numbers count as two real ones.
        reference: Of the baseline; its dtype may be another.
        scale: What x is divided by before it is compared.
        reference_scale: The same of the reference.

    Raises:
        ValueError: The shapes differ.
        RuntimeError, TypeError: torch can not widen a dtype.
    """
    if x.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)}, and {tuple(reference.shape)} of the baseline")
    x, reference = _real(x), _real(reference)
    if scale == reference_scale and _same_bits(x, reference):
        return equal_measures(x.numel())
    shift = 1.0
    if x.dtype in _WIDE_DTYPES or reference.dtype in _WIDE_DTYPES:
        shift = _shift(max(_amax(x) / scale, _amax(reference) / reference_scale))
    sums = _Sums()
    for chunk, of_reference in _widened(x, reference, scale * shift, reference_scale * shift):
        sums.add(chunk, of_reference)
        if sums.lost:
            break
    return sums.measures(x.numel(), shift)


@dataclass
class _Sums:
    """Over the elements that are finite in both; `lost` counts those that are not and do not agree."""

    signal: float = 0.0
    squares: float = 0.0
    product: float = 0.0
    error: float = 0.0
    max_error: float = 0.0
    lost: int = 0

    def add(self, x: Tensor, reference: Tensor) -> None:
        """Take in a chunk; overwrites `x` and, where it is not finite, `reference`."""
        squares, signal = float(torch.dot(x, x)), float(torch.dot(reference, reference))
        if not math.isfinite(squares + signal):
            self.lost += _set_aside(x, reference)
            squares, signal = float(torch.dot(x, x)), float(torch.dot(reference, reference))
        self.squares += squares
        self.signal += signal
        self.product += float(torch.dot(x, reference))
        x.sub_(reference)
        self.error += float(torch.dot(x, x))
        smallest, largest = torch.aminmax(x)
        self.max_error = max(self.max_error, -float(smallest), float(largest))

    def measures(self, count: int, shift: float) -> Measures:
        if self.lost:
            return Measures(
                equal=False,
                sqnr_db=-math.inf,
                cosine=math.nan,
                relative_l2=math.inf,
                max_error=math.inf,
                count=count,
            )
        return Measures(
            equal=False,
            sqnr_db=_decibels(self.signal, self.error),
            cosine=self._cosine(),
            relative_l2=math.sqrt(self.error / self.signal) if self.signal else math.inf if self.error else 0.0,
            max_error=self.max_error * shift,
            count=count,
        )

    def _cosine(self) -> float:
        if not self.error:
            return 1.0
        lengths = math.sqrt(self.squares) * math.sqrt(self.signal)
        return max(-1.0, min(1.0, self.product / lengths)) if lengths else math.nan


def _decibels(signal: float, error: float) -> float:
    if not error:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(error)) if signal else -math.inf


def _set_aside(x: Tensor, reference: Tensor) -> int:
    """Make elements that are not finite in both zero in both; returns how many of them do not agree."""
    aside = ~(torch.isfinite(x) & torch.isfinite(reference))
    agree = (x == reference) | (torch.isnan(x) & torch.isnan(reference))
    lost = int((aside & ~agree).sum())
    x.masked_fill_(aside, 0.0)
    reference.masked_fill_(aside, 0.0)
    return lost


def _real(x: Tensor) -> Tensor:
    x = x.detach()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _same_bits(x: Tensor, reference: Tensor) -> bool:
    if x.dtype != reference.dtype:
        return False
    return all(torch.equal(*_as_words(piece, of_reference)) for piece, of_reference in _pieces(x, reference))


def _as_words(*pieces: Tensor) -> list[Tensor]:
    """The bytes of one-dimensional tensors, eight at a time where they allow it: comparing costs by the element."""
    content = [piece.view(torch.uint8) for piece in pieces]
    whole = all(one.numel() % _WORD == 0 and one.storage_offset() % _WORD == 0 for one in content)
    return [one.view(torch.int64) for one in content] if whole else content


def _amax(x: Tensor) -> float:
    """Largest magnitude of the finite elements; 0 where there is none."""
    largest = 0.0
    for piece, _ in _pieces(x, x):
        for (part,) in _chunks(piece):
            ends = torch.stack(torch.aminmax(part.to(torch.float64))).abs_()
            if not torch.isfinite(ends).all():
                magnitudes = part.to(torch.float64).abs()
                ends = magnitudes.masked_fill_(~torch.isfinite(magnitudes), 0.0)
            largest = max(largest, float(ends.max()))
    return largest


def _shift(amax: float) -> float:
    """A power of two that brings a largest magnitude close to 1; 1 where squares are in range without it."""
    exponent = math.frexp(amax)[1]
    return 1.0 if abs(exponent) <= _SAFE_EXPONENT or not amax else math.ldexp(1.0, exponent - 1)


def _widened(x: Tensor, reference: Tensor, scale: float, reference_scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunk after chunk of both, divided by their scales, in two buffers of float64 that are used again."""
    room = min(_CHUNK, x.numel())
    buffers = [torch.empty(room, dtype=torch.float64) for _ in range(2)]
    for pieces in _pieces(x, reference):
        for parts in _chunks(*pieces):
            chunks = [buffer[: len(part)].copy_(part) for buffer, part in zip(buffers, parts, strict=True)]
            for chunk, divisor in zip(chunks, (scale, reference_scale), strict=True):
                if divisor != 1.0:
                    chunk.div_(divisor)
            yield chunks[0], chunks[1]


def _chunks(*pieces: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """One-dimensional tensors of one length, a chunk of each at a time."""
    for begin in range(0, pieces[0].numel(), _CHUNK):
        yield tuple(piece[begin : begin + _CHUNK] for piece in pieces)


def _pieces(x: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both as one-dimensional contiguous pieces: one view each where both are contiguous, else copies of a chunk."""
    if x.is_contiguous() and reference.is_contiguous():
        if x.numel():
            yield x.reshape(-1), reference.reshape(-1)
    elif x.numel() <= _CHUNK:
        yield x.reshape(-1).contiguous(), reference.reshape(-1).contiguous()
    else:
        dim = max(range(x.dim()), key=lambda dim: x.shape[dim])
        half = x.shape[dim] // 2
        for begin, length in ((0, half), (half, x.shape[dim] - half)):
            yield from _pieces(x.narrow(dim, begin, length), reference.narrow(dim, begin, length))
