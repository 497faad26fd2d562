"""Make the vectors of FP8 with one scale a tensor: `python tests/golden/make_fp8.py tests/golden`.

Every number is a fraction, so nothing is rounded but where the rule says so, by `nearest_float32` and by the search in
the list of the element's values; nothing here comes from the package that the vectors are to judge.

    scale = float32(max_element / amax), at most the largest float32; 1 where amax is 0, Inf or NaN
    y     = float32(element(float32(x * scale)) * float32(1 / scale))

`element` rounds to nearest, ties to the even code, and saturates. NaN stays NaN. Zeros keep their signs.
"""

import argparse
import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

ELEMENTS_OF_A_TENSOR = 1024
FLOAT32_FRACTION_BITS, FLOAT32_LOWEST_EXPONENT = 23, -126
FLOAT32_MAX = (2 - Fraction(1, 2**FLOAT32_FRACTION_BITS)) * 2**127
SIGN_CODE, NAN_CODE = 0x80, 0x7F


@dataclass(frozen=True)
class Element:
    """The bit layout of an 8-bit element; `last_code` is that of its largest finite value."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    last_code: int

    def value(self, code: int) -> Fraction:
        """What a code without its sign bit stands for."""
        field, fraction = divmod(code, 2**self.mantissa_bits)
        significand = Fraction(fraction, 2**self.mantissa_bits) + (1 if field else 0)
        return significand * Fraction(2) ** (max(field, 1) - self.bias)

    def values(self) -> list[Fraction]:
        """All finite values that are not negative: the place in the list is the code."""
        return [self.value(code) for code in range(self.last_code + 1)]


ELEMENTS = {
    "fp8_e4m3": Element(exponent_bits=4, mantissa_bits=3, bias=7, last_code=0x7E),
    "fp8_e5m2": Element(exponent_bits=5, mantissa_bits=2, bias=15, last_code=0x7B),
}


def nearest_float32(value: Fraction) -> Fraction:
    """The float32 nearest to a value that is not negative, ties to even. (No y of the rule reaches 2^128.)"""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, FLOAT32_LOWEST_EXPONENT) - FLOAT32_FRACTION_BITS)
    return round(value / quantum) * quantum  # round() of a Fraction takes ties to even


def nearest_code(value: Fraction, values: list[Fraction]) -> int:
    """The place of the nearest of ascending values, of the even one of two; the last one for all beyond it."""
    above = bisect_left(values, value)
    if above == len(values):
        return above - 1
    if above == 0:
        return 0
    to_below, to_above = value - values[above - 1], values[above] - value
    if to_below == to_above:
        return above if above % 2 == 0 else above - 1
    return above if to_above < to_below else above - 1


def scale_of(x: np.ndarray, largest: Fraction) -> Fraction:
    """The scale of a tensor: the rule's first line."""
    if not np.isfinite(x).all() or not x.any():
        return Fraction(1)
    amax = max(abs(Fraction(float(value))) for value in x)
    return min(nearest_float32(largest / amax), FLOAT32_MAX)


def quantized(x: np.ndarray, element: Element) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """(y, scale, codes) of one tensor, float32 [n]: the rule's second line, element by element."""
    values = element.values()
    scale = scale_of(x, values[-1])
    inverse = nearest_float32(1 / scale)
    y, codes = np.empty(x.shape), np.empty(x.shape, dtype=np.uint8)
    for place, number in enumerate(x.tolist()):
        if math.isnan(number):
            y[place], codes[place] = math.nan, NAN_CODE
            continue
        sign = math.copysign(1.0, number)
        infinite = math.isinf(number)
        code = element.last_code if infinite else nearest_code(nearest_float32(abs(Fraction(number)) * scale), values)
        y[place] = sign * float(nearest_float32(values[code] * inverse))
        codes[place] = code | (SIGN_CODE if sign < 0 else 0)
    return y.astype(np.float32), np.float32(float(scale)), codes


def inputs(element: Element) -> dict[str, np.ndarray]:
    """Name -> float32 [1024] of every tensor."""
    numbers = np.random.default_rng(seed=8)
    largest = float(element.value(element.last_code))
    huge, tiny = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal

    def gaussian(factor: float = 1.0) -> np.ndarray:
        return (numbers.standard_normal(ELEMENTS_OF_A_TENSOR) * factor).astype(np.float32)

    def with_some(values: list[float], factor: float = 1.0) -> np.ndarray:
        """A gaussian tensor in which every fifth element is one of the values, in turn."""
        x = gaussian(factor)
        x[::5] = np.resize(np.array(values, dtype=np.float32), x[::5].shape)
        return x

    def with_amax(amax: float) -> np.ndarray:
        """A gaussian tensor scaled to an amax, which is negative and stands last."""
        x = gaussian()
        x = np.clip(x / np.abs(x).max() * np.float64(amax), -amax, amax).astype(np.float32)
        x[-1] = -np.float32(amax)
        return x

    return {
        "gaussian": gaussian(),
        "gaussian bf16": (gaussian().view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        "wide": gaussian() * np.exp2(numbers.integers(-28, 3, ELEMENTS_OF_A_TENSOR)).astype(np.float32),
        "small": gaussian(1e-36),
        "tiny": gaussian(2.0**-132),
        "amax is the smallest float32": with_some([tiny, -tiny], factor=0.0),
        "huge": gaussian(2.0**120),
        "amax is the largest float32": with_amax(huge),
        "amax is a power of two": with_amax(2.0**-7),
        "zeros": with_some([0.0, -0.0, 1e-12, -1e-12]),
        "amax is 0": np.resize(np.array([0.0, -0.0], dtype=np.float32), ELEMENTS_OF_A_TENSOR),
        "nan": with_some([math.nan], factor=100.0),
        "inf": with_some([math.inf, 0.0, -math.inf, -0.0], factor=1e5),
        "nan and inf": with_some([math.nan, math.inf, -math.inf, largest, -huge, tiny]),
        "ties": ties(element, 1.0),
        "ties, scaled down": ties(element, 2.0**-40),
        "ties, scaled up": ties(element, 2.0**60),
    }


def ties(element: Element, factor: float) -> np.ndarray:
    """All values of the element and the middles between them, with both float32 neighbours and signs in turn.

    The largest magnitude is the element's own, so that the scale is the power of two 1 / factor.
    """
    values = np.array([float(value) for value in element.values()], dtype=np.float32)
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2]) * np.float32(factor)
    below, above = (np.nextafter(exact, np.float32(limit)) for limit in (0.0, math.inf))
    x = np.concatenate([exact, below, above]).clip(max=values[-1] * np.float32(factor))
    x[1::2] *= -1
    return np.concatenate([x, np.zeros(ELEMENTS_OF_A_TENSOR - len(x), dtype=np.float32)])


def vectors(element: Element) -> dict[str, np.ndarray]:
    """The arrays of one file: kind_names [t], x and y float32 [t, 1024], scale float32 [t], code uint8 [t, 1024]."""
    tensors = inputs(element)
    results = [quantized(x, element) for x in tensors.values()]
    y, scale, code = (np.stack(part) for part in zip(*results, strict=True))
    x = np.stack(list(tensors.values()))
    return {"kind_names": np.array(list(tensors)), "x": x, "y": y, "scale": scale, "code": code}


def main() -> None:
    """Write one file for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    target = parser.parse_args().target
    for name, element in ELEMENTS.items():
        np.savez_compressed(target / f"{name}_tensor.npz", **vectors(element))


if __name__ == "__main__":
    main()
