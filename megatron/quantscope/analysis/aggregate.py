"""Rows of the summary table put together: ranks, samples, layers or sites become one row, exactly.

Counts and sums of squares add up; what is a ratio (rms, SQNR, percentages) is computed again from the sums, never
averaged. The largest value of a group is its amax, and its worst kurtosis stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.channels import pooled_channels
from megatron.quantscope.analysis.distribution import TOP
from megatron.quantscope.analysis.exponents import ExponentHistogram, added
from megatron.quantscope.analysis.format_errors import POW2_FORMATS, POW2_SUFFIX
from megatron.quantscope.analysis.roles import GRADIENT_FAMILIES, site_order
from megatron.quantscope.analysis.tables import ERROR_FIELDS

if TYPE_CHECKING:
    import pandas

_BASES = ("count", "zero", "nan", "inf", "sum_squares")  # what a treatment's ratios are taken of
_SUMMED = (*_BASES, "bytes", "sum", "blocks", "zero_blocks")
_LARGEST = ("amax", "max", "kurtosis")
_SMALLEST = ("min",)

Floats = npt.NDArray[np.float64]


def treatments_of(frame: pandas.DataFrame) -> list[str]:
    """The names of the treatments that a summary table has columns of."""
    suffix = ".error_squares"
    return [column.removesuffix(suffix) for column in frame.columns if column.endswith(suffix)]


def as_trained(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The table with each gradient's errors as training makes them by default.

    For gradients the columns of `POW2_FORMATS` are those of the scaled treatment, whose own columns go; so `hifp8`
    means in every row what a run with `--quant-type hifp8` does to that tensor. Other treatments stay as they are.
    """
    gradient = frame["family"].isin(GRADIENT_FAMILIES)
    result = frame.copy(deep=False)
    for name in set(POW2_FORMATS) & set(treatments_of(frame)):
        for part in (*ERROR_FIELDS, "sqnr_db"):
            scaled = f"{name}{POW2_SUFFIX}.{part}"
            result[f"{name}.{part}"] = frame[f"{name}.{part}"].where(~gradient, frame[scaled])
            result = result.drop(columns=scaled)
    return result.copy()  # its columns together again: so many that were put in one by one are slow to work with


def merged(frame: pandas.DataFrame, by: str | Sequence[str]) -> pandas.DataFrame:
    """One row a group of `by`, which become its index, with `rows` and these columns.

    Sums (count, zero, nan, inf, bytes, sum, sum_squares, blocks, zero_blocks and those of each treatment), extremes
    (amax, max, min, kurtosis), and what follows from them: rms, mean, zero_percent, nonfinite, and for each treatment T
    `T.sqnr_db`, `T.relative_error` = sqrt(error / signal), `T.underflow_percent` of the non-zero, `T.saturated_percent`
    and `T.lost_percent` of the finite elements. A treatment's figures are those of the rows that it was tried on (a
    second use, `T@2`, not all tensors have), and NaN where there is none.
    """
    import pandas

    groups = frame.groupby(by if isinstance(by, str) else list(by), sort=True, dropna=False)
    how = dict.fromkeys(_LARGEST, "max") | dict.fromkeys(_SMALLEST, "min")
    result = groups[[column for column in _SUMMED if column in frame]].sum().join(groups.agg(how))
    derived = {"rows": groups.size()} | _derived(result)
    parts = [result, pandas.DataFrame(derived)]
    for tried, names in _by_rows_tried(frame).items():
        rows = frame.loc[np.frombuffer(tried, dtype=bool)]
        groups = rows.groupby(by if isinstance(by, str) else list(by), sort=True, dropna=False)
        sums = groups[[*_BASES, *(f"{name}.{part}" for name in names for part in ERROR_FIELDS)]].sum()
        parts.append(_errors(sums, names).reindex(result.index))
    return pandas.concat(parts, axis=1)


def _derived(sums: pandas.DataFrame) -> dict[str, pandas.Series]:
    finite = sums["count"] - sums["nan"] - sums["inf"]
    return {
        "rms": np.sqrt(sums["sum_squares"] / finite),
        "mean": sums["sum"] / finite,
        "zero_percent": 100 * sums["zero"] / sums["count"],
        "nonfinite": sums["nan"] + sums["inf"],
    }


def _by_rows_tried(frame: pandas.DataFrame) -> dict[bytes, list[str]]:
    """Treatments by the rows that have them: a mask of rows as bytes -> names."""
    found: dict[bytes, list[str]] = {}
    for name in treatments_of(frame):
        found.setdefault(frame[f"{name}.error_squares"].notna().to_numpy().tobytes(), []).append(name)
    return found


def _errors(sums: pandas.DataFrame, names: Sequence[str]) -> pandas.DataFrame:
    """The columns of treatments of groups, from sums over the rows that have them."""
    import pandas

    finite = sums["count"] - sums["nan"] - sums["inf"]
    result: dict[str, Any] = {}
    for name in names:
        error = {part: sums[f"{name}.{part}"] for part in ERROR_FIELDS}
        result |= {f"{name}.{part}": values for part, values in error.items()}
        arrays = (values.to_numpy(float) for values in (sums["sum_squares"], error["error_squares"], error["lost"]))
        result[f"{name}.sqnr_db"] = sqnr_db(*arrays)
        result[f"{name}.relative_error"] = np.sqrt(error["error_squares"] / sums["sum_squares"])
        result[f"{name}.underflow_percent"] = 100 * error["underflow"] / (finite - sums["zero"])
        for part in ("saturated", "lost"):
            result[f"{name}.{part}_percent"] = 100 * error[part] / finite
    return pandas.DataFrame(result, index=sums.index)


def sqnr_db(signal_squares: Floats, error_squares: Floats, lost: Floats) -> Floats:
    """SQNR of groups from their sums, as `FormatError.sqnr_db` defines it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(signal_squares > 0, signal_squares / error_squares, np.nan)
        result: Floats = np.where(lost > 0, -np.inf, 10 * np.log10(ratio))
    return result


def layer_matrix(groups: pandas.DataFrame, column: str) -> tuple[list[str], list[int], Floats]:
    """A column as an image: sites by layers, NaN where there is nothing.

    Args:
        groups: What `merged(frame, ["site", "layer_idx"])` gave, or a part of it.
        column: Which of its columns.

    Returns:
        The sites in the order of the forward pass, the layers ascending, and the values [sites, layers].
    """
    table = groups[column].unstack("layer_idx")
    table = table[[layer for layer in table.columns if layer == layer]]  # NaN: outside the layers
    sites = sorted(table.index, key=site_order)
    values = table.loc[sites].to_numpy(dtype=float, na_value=np.nan)
    return sites, [int(layer) for layer in table.columns], values


def largest_by_layer(frame: pandas.DataFrame) -> tuple[list[int], Floats]:
    """The layers of these rows, and [layers, TOP] the largest magnitudes of the tensor with the largest, else NaN."""
    layers = [int(layer) for layer in sorted(frame["layer_idx"].dropna().unique())]
    result = np.full((len(layers), TOP), np.nan)
    for layer, top in zip(frame["layer_idx"], frame["top"], strict=True):
        if layer == layer and len(top):
            row = layers.index(int(layer))
            if not result[row, 0] >= top[0]:
                result[row] = np.nan
                result[row, : len(top)] = top
    return layers, np.where(result > 0, result, np.nan)


def exponents_of(frame: pandas.DataFrame) -> ExponentHistogram:
    """The exponents of all elements of these rows."""
    rows = zip(frame["exponent_first"], frame["exponent_counts"], strict=True)
    return added(ExponentHistogram(int(first), np.asarray(counts, dtype=np.int64)) for first, counts in rows)


def depths_of(frame: pandas.DataFrame) -> npt.NDArray[np.int64]:
    """[DEPTHS]: the elements of these rows by binades below their block's amax; empty where none was in blocks."""
    counted = [np.asarray(depths, dtype=np.int64) for depths in frame["block_depths"] if len(depths)]
    return np.sum(counted, axis=0, dtype=np.int64) if counted else np.zeros(0, dtype=np.int64)


def exponent_image(frame: pandas.DataFrame, binades: range) -> tuple[list[int], Floats]:
    """The layers of these rows, and [binades, layers]: percent of a layer's elements in a binade, NaN where none is."""
    layers = [int(layer) for layer in sorted(frame["layer_idx"].dropna().unique())]
    counts, totals = np.zeros((len(binades), len(layers))), np.zeros(len(layers))
    columns = ("layer_idx", "count", "exponent_first", "exponent_counts")
    for layer, elements, first, in_bins in zip(*(frame[column] for column in columns), strict=True):
        if layer == layer:
            place = layers.index(int(layer))
            totals[place] += elements
            rows = np.arange(first, first + len(in_bins)) - binades.start
            inside = (rows >= 0) & (rows < len(binades))
            counts[rows[inside], place] += np.asarray(in_bins)[inside]
    return layers, np.where(counts > 0, 100 * counts / np.maximum(totals, 1), np.nan)


def channels_by_layer(frame: pandas.DataFrame, tiles: int) -> tuple[list[int], int, Floats]:
    """The layers of one site, its number of channels, and [layers, at most tiles]: the amax of neighbouring channels.

    Tensors with another number of channels than the widest are left out.
    """
    layers = [int(layer) for layer in sorted(frame["layer_idx"].dropna().unique())]
    width, image = 0, np.zeros((len(layers), 0))
    for layer, row in zip(frame["layer_idx"], frame["channel_amax"], strict=True):  # once: the rows lie on disk
        if len(row) > width:
            width, image = len(row), np.zeros((len(layers), min(len(row), tiles)))
        if layer == layer and len(row) == width:
            place = layers.index(int(layer))
            image[place] = np.maximum(image[place], pooled_channels(np.asarray(row), image.shape[1]))
    return layers, width, image
