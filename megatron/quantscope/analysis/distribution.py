"""The shape of a tensor's distribution: quantiles, the largest magnitudes, and how heavy the tails are.

Quantiles are kept at the levels of a standard normal's equidistant scores, so that a Q-Q plot against a Gaussian is a
plot of one column against another, with the quartiles beside them. They are exact for bf16 and fp16, where the counts
of all values are known, and of an evenly spaced sample for wider dtypes, in which every channel has its share.

Kurtosis is E[x^4] / E[x^2]^2 about zero: 3 for a Gaussian; it grows with outliers, some steps before training diverges.
Like the largest magnitudes it is of all elements, whatever the dtype: one channel of thousands can make all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count as count_from
from math import gcd
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats import bit_pattern_counts, slabs
from megatron.quantscope.formats.patterns import PATTERN_DTYPES, PATTERNS, bit_patterns

NORMAL_SCORES = tuple(step / 4 for step in range(-18, 19))
_QUARTILES = (0.25, 0.75)
QUANTILE_LEVELS = tuple(sorted([*(NormalDist().cdf(score) for score in NORMAL_SCORES), *_QUARTILES]))
_WHISKER_SCORE = 3.0
TOP = 3
_SAMPLE = 1 << 20  # elements, to twice that, that quantiles of a wide tensor are taken from
_CHUNK = 1 << 18  # elements of a wide tensor at a time: 2 MB of float64

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The shape of the finite elements of one tensor; every field is None or empty where there are none.

    Attributes:
        quantiles: At `QUANTILE_LEVELS`: the smallest element with at least that share of elements not above it.
        median_magnitude: Median of |x|.
        top: The `TOP` largest |x|, descending, fewer if there are fewer elements.
        kurtosis: About zero; None where all elements are zero.
    """

    quantiles: tuple[float, ...] = ()
    median_magnitude: float | None = None
    top: tuple[float, ...] = ()
    kurtosis: float | None = None


def distribution_of(x: Tensor) -> Distribution:
    """The distribution of a tensor of any real dtype and shape."""
    return _of_patterns(x) if x.dtype in PATTERN_DTYPES else _of_wide(x)


def weighted_quantiles(values: Floats, counts: Integers, levels: tuple[float, ...]) -> Floats:
    """The smallest of the ascending `values` with at least a share `level` of all elements not above it."""
    cumulative = np.cumsum(counts)
    index = np.searchsorted(cumulative, np.asarray(levels) * cumulative[-1], side="left")
    result: Floats = values[np.minimum(index, len(values) - 1)]
    return result


def score_quantiles(quantiles: npt.ArrayLike) -> Floats:
    """Of the values at QUANTILE_LEVELS those at NORMAL_SCORES, for a Q-Q plot."""
    places = [place for place, level in enumerate(QUANTILE_LEVELS) if level not in _QUARTILES]
    return np.asarray(quantiles, dtype=float)[places]


def box_statistics(quantiles: npt.ArrayLike) -> dict[str, float]:
    """Of the values at QUANTILE_LEVELS a box: `lower` and `upper` quartile, `median`, `low` and `high` at 3 sigma."""
    values, scores = np.asarray(quantiles, dtype=float), score_quantiles(quantiles)
    lower, upper = (float(values[QUANTILE_LEVELS.index(level)]) for level in _QUARTILES)
    ends = (-_WHISKER_SCORE, 0.0, _WHISKER_SCORE)
    low, median, high = (float(scores[NORMAL_SCORES.index(score)]) for score in ends)
    return {"low": low, "lower": lower, "median": median, "upper": upper, "high": high}


def _of_patterns(x: Tensor) -> Distribution:
    """Of a bf16 or fp16 tensor, exactly: all its values are known by number, and the patterns are in order of size."""
    counts, magnitudes = bit_pattern_counts(x), _pattern_magnitudes(x.dtype)
    positive, negative = (counts[start : start + len(magnitudes)] for start in (0, PATTERNS // 2))
    both = positive + negative
    used = np.flatnonzero(both[1:]) + 1
    around = slice(used[0], used[-1] + 1) if len(used) else slice(0)
    magnitudes, zeros, both = magnitudes[around], both[:1], both[around]
    if not zeros[0] + len(used):
        return Distribution()
    values = np.concatenate([-magnitudes[::-1], [0.0], magnitudes])
    value_counts = np.concatenate([negative[around][::-1], zeros, positive[around]])
    sizes, size_counts = np.concatenate([[0.0], magnitudes]), np.concatenate([zeros, both])
    largest = [place - around.start + 1 for place in used[: -TOP - 1 : -1]] + [0]
    return _distribution(
        values, value_counts, sizes, size_counts, _repeated((sizes[place], size_counts[place]) for place in largest)
    )


def spread_stride(count: int, wanted: int) -> int:
    """The step that takes about `wanted` to twice as many of `count` elements, evenly spaced; all where there are less.

    It shares no factor with `count`, and so with no dimension of the tensor: a step that divides the width of a row
    would see some channels always and the others never.
    """
    return next(step for step in count_from(max(1, count // wanted)) if gcd(step, count) == 1)


def _of_wide(x: Tensor) -> Distribution:
    """Of a tensor of another dtype: quantiles of a sample, the rest of all elements."""
    flat = slabs.flat(x.detach())
    top, kurtosis = _extremes(flat)
    sample = flat[:: spread_stride(len(flat), _SAMPLE)]
    values = _finite(sample if sample.is_floating_point() else sample.double()).numpy()
    if not len(values):
        return Distribution(top=top, kurtosis=kurtosis)
    ordered, places = np.sort(values), _places(QUANTILE_LEVELS, len(values))
    (middle,) = _places((0.5,), len(values))
    return Distribution(
        quantiles=tuple(ordered[places].tolist()),
        median_magnitude=float(np.partition(np.abs(values), middle)[middle]),
        top=top,
        kurtosis=kurtosis,
    )


def _extremes(flat: Tensor) -> tuple[tuple[float, ...], float | None]:
    """The largest magnitudes and the kurtosis; each chunk in units of its own amax, so that no power overflows."""
    largest: list[float] = []
    moments = []
    for chunk in torch.split(flat, _CHUNK):
        sizes = _finite(chunk.double().abs())
        if len(sizes):
            top = torch.topk(sizes, min(TOP, len(sizes))).values.tolist()
            largest, amax = sorted([*largest, *top], reverse=True)[:TOP], top[0]
            squares = sizes.div_(amax or 1.0).square_()
            moments.append((amax, len(sizes), float(squares.sum()), float(squares @ squares)))
    if not largest or largest[0] == 0:
        return tuple(largest), None
    amaxes, counts, second, fourth = np.array(moments).T
    ratio = np.square(amaxes / largest[0])
    return tuple(largest), float((fourth @ np.square(ratio)) * counts.sum() / (second @ ratio) ** 2)


def _finite(x: Tensor) -> Tensor:
    """The finite elements; x itself where all are."""
    finite = torch.isfinite(x)
    return x if bool(finite.all()) else x[finite]


def _places(levels: tuple[float, ...], count: int) -> Integers:
    """The quantiles' places in order: the first element with at least that share of `count` elements not above it."""
    places: Integers = np.maximum(np.ceil(np.asarray(levels) * count).astype(np.int64) - 1, 0)
    return places


def _distribution(
    values: Floats, counts: Integers, sizes: Floats, size_counts: Integers, top: Iterable[float]
) -> Distribution:
    """From values and magnitudes, both ascending, and how often each occurs."""
    return Distribution(
        quantiles=tuple(weighted_quantiles(values, counts, QUANTILE_LEVELS).tolist()),
        median_magnitude=float(weighted_quantiles(sizes, size_counts, (0.5,))[0]),
        top=tuple(top),
        kurtosis=_kurtosis(sizes, size_counts),
    )


def _repeated(counted: Iterable[tuple[float, int]]) -> list[float]:
    """The first `TOP` of numbers, each as often as it is there."""
    return [float(number) for number, count in counted for _ in range(min(count, TOP))][:TOP]


def _kurtosis(sizes: Floats, counts: Integers) -> float | None:
    amax = float(sizes[-1])
    if amax == 0:
        return None
    squares = np.square(sizes / amax)  # no power overflows
    weights = counts.astype(np.float64)
    return float((np.square(squares) @ weights) * weights.sum() / (squares @ weights) ** 2)


@cache
def _pattern_magnitudes(dtype: torch.dtype) -> Floats:
    """The finite magnitudes of bf16 or fp16: ascending, each at the place of its bits."""
    values = bit_patterns(dtype)[: PATTERNS // 2]
    magnitudes: Floats = values[torch.isfinite(values)].double().numpy()
    return magnitudes
