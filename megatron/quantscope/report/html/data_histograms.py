"""The histograms of all cells at once: the counts of a row are added to those of its cell, in one array.

The scales of an MX format follow from the amax of blocks as `analysis.scales` says; here for every cell together, and
for all formats from one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.format_errors import FLOOR, Treatment
from megatron.quantscope.analysis.scales import scale_counts
from megatron.quantscope.analysis.tables import BLOCK_PREFIXES
from megatron.quantscope.formats.blocks import FRACTION_CLASSES
from megatron.quantscope.report.html.data_formats import format_of

if TYPE_CHECKING:
    from megatron.quantscope.report.html.data_cells import Cells

Histogram = dict[str, Any]
"""`{first, counts}`; as `exponents.ExponentHistogram`."""
Counts = npt.NDArray[np.int64]


def exponent_histograms(cells: Cells) -> list[Histogram]:
    """The elements of each cell by exponent."""
    first, counts = _summed(cells, "exponent_first", "exponent_counts")
    return _trimmed(first, counts[:, :, 0])


def scale_histograms(cells: Cells) -> list[dict[str, Histogram]]:
    """The blocks of each cell by the exponent of their scale, for each treatment with E8M0 scales."""
    found: list[dict[str, Histogram]] = [{} for _ in range(len(cells))]
    tried = [Treatment.named(name) for name in cells.treatments if format_of(name).scale == "e8m0"]
    for use, prefix in enumerate(BLOCK_PREFIXES):
        first = f"{prefix}_exponent_first"
        by_exponent = _summed(cells, first, f"{prefix}_exponent_counts")
        by_fraction = _summed(cells, first, f"{prefix}_fraction_counts", FRACTION_CLASSES)
        for treatment in (treatment for treatment in tried if treatment.use == use):
            blocks = by_exponent if treatment.scale_rule == FLOOR else by_fraction
            for cell, histogram in enumerate(_trimmed(*scale_counts(*blocks, treatment.record))):
                if histogram["counts"]:
                    found[cell][treatment.name] = histogram
    return found


def _summed(cells: Cells, first_column: str, column: str, classes: int = 1) -> tuple[int, Counts]:
    """The first exponent of all, and [cells, exponents, classes]."""
    firsts = cells.rows[first_column].fillna(0).astype(int)
    lengths = np.array([_length(counts) for counts in cells.rows[column]]) // classes
    used = lengths > 0
    if not used.any():
        return 0, np.zeros((len(cells), 1, classes), dtype=np.int64)
    lowest = int(firsts[used].min())
    result = np.zeros((len(cells), int((firsts[used] + lengths[used]).max()) - lowest, classes), dtype=np.int64)
    rows = zip(cells.rows["cell"], firsts, lengths, cells.rows[column], strict=True)
    for cell, first, length, counts in rows:
        if length:
            start = first - lowest
            result[cell, start : start + length] += np.asarray(counts, dtype=np.int64).reshape(length, classes)
    return lowest, result


def _length(counts: Sequence[int] | None) -> int:
    return 0 if counts is None else len(counts)


def _trimmed(first: int, counts: Counts) -> list[Histogram]:
    """Each row without the empty binades at its ends."""
    width = counts.shape[1]
    used = counts > 0
    begins = np.where(used.any(axis=1), used.argmax(axis=1), 0)
    ends = np.where(used.any(axis=1), width - used[:, ::-1].argmax(axis=1), 0)
    rows = zip(begins.tolist(), ends.tolist(), counts.tolist(), strict=True)
    return [{"first": first + begin, "counts": row[begin:end]} for begin, end, row in rows]
