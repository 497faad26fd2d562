"""The shape of a tensor's distribution: quantiles, the largest magnitudes, and how heavy the tails are.

Quantiles are kept at the levels of a standard normal's equidistant scores, so that a Q-Q plot against a Gaussian is a
plot of one column against another, with the quartiles beside them. They are exact for bf16 and fp16, where the counts
of all values are known, and of an evenly spaced sample for wider dtypes.

Kurtosis is E[x^4] / E[x^2]^2 about zero: 3 for a Gaussian; it grows with outliers, some steps before training diverges.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.analysis.elementwise import WeightedValues

NORMAL_SCORES = tuple(step / 4 for step in range(-18, 19))
_QUARTILES = (0.25, 0.75)
QUANTILE_LEVELS = tuple(sorted([*(NormalDist().cdf(score) for score in NORMAL_SCORES), *_QUARTILES]))
_WHISKER_SCORE = 3.0
TOP = 3
_SAMPLE = 1 << 20  # elements of a wide tensor that quantiles are taken from

Floats = npt.NDArray[np.float64]


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


def distribution_of(tensor: Tensor, weighted: WeightedValues | None) -> Distribution:
    """The distribution of a floating-point tensor.

    Args:
        tensor: Any shape.
        weighted: Its finite values, ascending, with counts, where they are known; None: they are read from `tensor`.
    """
    if weighted is None:
        values, top, kurtosis = _from_wide(tensor)
        counts = np.ones(len(values), dtype=np.int64)
    else:
        values, counts = weighted.values.double().numpy(), weighted.counts
        top = _largest(values, counts)
        kurtosis = _kurtosis(values, counts)
    if not len(values):
        return Distribution()
    magnitudes, order = np.abs(values), np.argsort(np.abs(values), kind="stable")
    return Distribution(
        quantiles=tuple(float(value) for value in weighted_quantiles(values, counts, QUANTILE_LEVELS)),
        median_magnitude=float(weighted_quantiles(magnitudes[order], counts[order], (0.5,))[0]),
        top=top,
        kurtosis=kurtosis,
    )


def weighted_quantiles(values: Floats, counts: npt.NDArray[np.int64], levels: tuple[float, ...]) -> Floats:
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


def _from_wide(tensor: Tensor) -> tuple[Floats, tuple[float, ...], float | None]:
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLE)
    spaced = flat[::stride].double()
    sample: Floats = torch.sort(spaced[torch.isfinite(spaced)]).values.numpy()
    magnitudes = torch.where(torch.isfinite(flat), flat, 0).abs()
    finite = int(torch.isfinite(flat).sum())
    top = torch.topk(magnitudes, min(TOP, finite)).values.double().tolist()
    return sample, tuple(top), _kurtosis(sample, np.ones(len(sample), dtype=np.int64))


def _largest(values: Floats, counts: npt.NDArray[np.int64]) -> tuple[float, ...]:
    ends = np.concatenate([np.arange(min(TOP, len(values))), np.arange(max(TOP, len(values) - TOP), len(values))])
    repeated = np.repeat(np.abs(values[ends]), np.minimum(counts[ends], TOP))
    return tuple(float(value) for value in np.sort(repeated)[::-1][:TOP])


def _kurtosis(values: Floats, counts: npt.NDArray[np.int64]) -> float | None:
    amax = float(np.abs(values).max(initial=0.0))
    if amax == 0:
        return None
    squares = np.square(values / amax)  # no power overflows
    return float(np.dot(np.square(squares), counts) * counts.sum() / np.dot(squares, counts) ** 2)
