"""The codes of elements: which bit pattern stands for which value, as two tables a format.

Plain elements are sign, exponent field, fraction. The largest exponent field is an ordinary binade in the OCP elements
of four and six bits; E4M3 gives up its last value for NaN; E5M2 gives up the binade for Inf and NaN, as IEEE 754 does.

HiFloat8 says with a prefix, the dot field, how many bits its exponent has, so that numbers near 1 have more digits:

    prefix  exponent                 fraction
    11      sign, 3 bits: +-(8..15)  1 bit
    10      sign, 2 bits: +-(4..7)   2 bits
    01      sign, 1 bit:  +-(2..3)   3 bits
    001     sign:         +-1        3 bits
    0001    none: 0                  3 bits
    0000    2^(M-23) for the last three bits M = 1..7; M = 0 is zero, and with the sign bit set it is NaN

The leading one of the exponent's magnitude is not written. Where 1.5 * 2^15 would be, there is Inf.

Every value of these elements is a bf16, so its code can be looked up by the bf16's bits: `encode_table`.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats.records import Format

BYTE, NIBBLE = 8, 4
_PATTERNS = 1 << 16  # of bf16
_BF16_MAGNITUDE, _BF16_INF = 0x7FFF, 0x7F80
_FLOAT32_TO_BF16 = 16  # bits that are dropped
_DOT_FIELDS = ((0b11, 2, 4), (0b10, 2, 3), (0b01, 2, 2), (0b001, 3, 1), (0b0001, 4, 0))
"""(prefix, its bits, bits of the exponent with its sign)."""
_DENORMAL_BIAS = 23
_DENORMAL_BITS = 3


def has_codes(fmt: Format) -> bool:
    """Whether an element fits a byte; the others are their dtype's own bits."""
    return fmt.bits <= BYTE


def decode_table(fmt: Format) -> Tensor:
    """The value of each code: float32 [2**bits]."""
    return torch.from_numpy(_decode_array(fmt))


def encode_table(fmt: Format) -> Tensor:
    """The code of each value, by the bits of the value as bf16: uint8 [65536].

    NaN has one code a sign (of HiFloat8: one), 0 in elements without NaN. Patterns that are no value have 0.
    """
    return torch.from_numpy(_encode_array(fmt))


# The arrays are kept, not tensors: one that was made while a graph is traced would be a fake for ever.
@cache
def _decode_array(fmt: Format) -> npt.NDArray[np.float32]:
    value = _tapered_value if fmt.is_tapered else _plain_value
    negative = 1 << (fmt.bits - 1)
    magnitudes = [value(code, fmt) for code in range(negative)]
    negated = [-magnitude for magnitude in magnitudes]
    if not fmt.has_negative_zero:
        negated[0] = math.nan  # the pattern is free
    return np.array([*magnitudes, *negated], dtype=np.float32)


@cache
def _encode_array(fmt: Format) -> npt.NDArray[np.uint8]:
    patterns = np.arange(_PATTERNS)
    is_nan, is_negative = (patterns & _BF16_MAGNITUDE) > _BF16_INF, patterns > _BF16_MAGNITUDE
    table = np.zeros(_PATTERNS, dtype=np.uint8)
    if fmt.has_nan:
        table[is_nan] = nan_code(fmt)
        if fmt.has_negative_zero:
            table[is_nan & is_negative] = nan_code(fmt) | 1 << (fmt.bits - 1)
    values = _decode_array(fmt)
    codes = np.flatnonzero(~np.isnan(values))
    table[values[codes].view(np.uint32) >> _FLOAT32_TO_BF16] = codes
    return table


def nan_code(fmt: Format) -> int:
    """The code that NaN gets: the one that is quiet by IEEE 754, where there are several."""
    if not fmt.has_nan:
        raise ValueError(f"{fmt.name} has no code for NaN")
    if not fmt.has_negative_zero:
        return 1 << (fmt.bits - 1)
    quiet = 1 << (fmt.mantissa_bits - 1) if fmt.has_inf else (1 << fmt.mantissa_bits) - 1
    return ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits | quiet


def _plain_value(code: int, fmt: Format) -> float:
    field, fraction = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
    digits = fraction / (1 << fmt.mantissa_bits)
    value = math.ldexp(digits if field == 0 else 1 + digits, max(field, 1) - fmt.bias)
    if value <= fmt.max:
        return value
    return math.inf if fmt.has_inf and fraction == 0 else math.nan


def _tapered_value(code: int, fmt: Format) -> float:
    body = fmt.bits - 1
    row = next((row for row in _DOT_FIELDS if code >> (body - row[1]) == row[0]), None)
    if row is None:
        return math.ldexp(1.0, code - _DENORMAL_BIAS) if code & ((1 << _DENORMAL_BITS) - 1) else 0.0
    _, prefix_bits, exponent_bits = row
    fraction_bits = body - prefix_bits - exponent_bits
    digits = 1 + (code & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    exponent = 0
    if exponent_bits:
        field = code >> fraction_bits & ((1 << exponent_bits) - 1)
        leading = 1 << (exponent_bits - 1)
        magnitude = leading | (field & (leading - 1))
        exponent = -magnitude if field & leading else magnitude
    value = math.ldexp(digits, exponent)
    return value if value <= fmt.max else math.inf
