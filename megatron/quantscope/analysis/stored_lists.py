"""Columns of lists that stay on disk: histograms, quantiles and channel maxima of a summary table.

They make up most of a row (a thousand channel maxima are 4 KB) and are wanted of few rows at a time, so a frame holds
the places of its rows only: filtering, sorting and grouping move places, and looking at a list reads the row group that
it lies in, of that column alone. A frame of a hundred thousand tensors so takes what its numbers take, and so does a
copy of it in every process that draws.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas
from pandas.api.extensions import ExtensionArray, ExtensionDtype

from megatron.quantscope.analysis.errors import AnalysisError
from megatron.quantscope.analysis.identity import KEY
from megatron.quantscope.analysis.tables import RECORD_COLUMNS, summary_columns

if TYPE_CHECKING:
    import pyarrow

_BYTES_HELD = 16 << 20  # of row groups: the histograms of ten thousand tensors, or the channels of a few thousand
_MISSING = -1

Places = npt.NDArray[np.int64]


class StoredListDtype(ExtensionDtype):  # type: ignore[misc]
    """The dtype of `StoredLists`."""

    name = "stored_list"
    type: Any = np.ndarray
    kind = "O"
    na_value = None

    @classmethod
    def construct_array_type(cls) -> builtins.type[StoredLists]:
        """As pandas asks."""
        return StoredLists


class StoredLists(ExtensionArray):  # type: ignore[misc]
    """One column of lists.

    Args:
        path: The Parquet file.
        column: Its name.
        stamp: Time of its last change: lists of a file that was replaced are not those of this column.
        ends: [row groups]: the number of rows up to the end of each.
        places: [rows]: which rows of the file; -1: none, a missing value.
    """

    def __init__(self, path: Path, column: str, stamp: int, ends: tuple[int, ...], places: Places) -> None:
        self._path, self._column, self._stamp, self._ends, self._places = path, column, stamp, ends, places

    dtype = StoredListDtype()

    @property
    def nbytes(self) -> int:
        """Of what is held in memory."""
        return self._places.nbytes

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int | np.integer):
            return self._list_at(int(self._places[item]))
        return self._of(self._places[pandas.api.indexers.check_array_indexer(self, item)])

    def __iter__(self) -> Iterator[npt.NDArray[Any] | None]:
        return map(self._list_at, self._places.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        lists = np.empty(len(self), dtype=object)  # element by element: numpy would make lists of one length a matrix
        for index, value in enumerate(self):
            lists[index] = value
        return lists

    def isna(self) -> npt.NDArray[np.bool_]:
        """Which rows have no list."""
        missing: npt.NDArray[np.bool_] = self._places == _MISSING
        return missing

    def take(self, indices: Sequence[int], *, allow_fill: bool = False, fill_value: Any = None) -> StoredLists:
        """As pandas asks; a filled row is missing."""
        places = pandas.api.extensions.take(
            self._places, np.asarray(indices), allow_fill=allow_fill, fill_value=_MISSING
        )
        return self._of(places)

    def copy(self) -> StoredLists:
        """Another array of the same rows."""
        return self._of(self._places.copy())

    @classmethod
    def _from_sequence(cls, scalars: Any, *, dtype: Any = None, copy: bool = False) -> StoredLists:
        if isinstance(scalars, cls):
            return scalars.copy() if copy else scalars
        raise TypeError("lists that are stored in a file can not be made from others")

    @classmethod
    def _concat_same_type(cls, to_concat: Sequence[StoredLists]) -> StoredLists:
        first = to_concat[0]
        if any(part._source != first._source for part in to_concat):
            raise TypeError("lists of different files can not be put into one column")
        return first._of(np.concatenate([part._places for part in to_concat]))

    def _of(self, places: Places) -> StoredLists:
        return type(self)(*self._source, self._ends, places)

    @property
    def _source(self) -> tuple[Path, str, int]:
        return self._path, self._column, self._stamp

    def _list_at(self, place: int) -> npt.NDArray[Any] | None:
        if place == _MISSING:
            return None
        group = int(np.searchsorted(self._ends, place, side="right"))
        values, offsets = _groups.get(*self._source, group)
        row = place - (self._ends[group - 1] if group else 0)
        return values[offsets[row] : offsets[row + 1]]


def has_items(lists: pandas.Series) -> npt.NDArray[np.bool_]:
    """Which rows of a column have a list that is not empty; also of a column that was read, and of no rows."""
    return np.fromiter((one is not None and len(one) > 0 for one in lists), dtype=np.bool_, count=len(lists))


class _Groups:
    """The row groups that were looked at last, up to a number of bytes."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[Path, str, int, int], tuple[npt.NDArray[Any], npt.NDArray[Any]]] = OrderedDict()
        self._bytes = 0

    def get(self, path: Path, column: str, stamp: int, group: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The lists of a row group end to end, and where each begins."""
        key = (path, column, stamp, group)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        found = self._held[key] = _row_group(*key)
        self._bytes += found[0].nbytes
        while self._bytes > _BYTES_HELD and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1][0].nbytes
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._held.clear()
        self._bytes = 0


_groups = _Groups()  # of this process


def _row_group(path: Path, column: str, stamp: int, group: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    import pyarrow.parquet

    if path.stat().st_mtime_ns != stamp:
        raise AnalysisError(f"{path} was replaced while it was being read: another run writes to the same directory")
    lists = pyarrow.parquet.ParquetFile(path).read_row_group(group, columns=[column])[column].combine_chunks()
    return lists.flatten().to_numpy(zero_copy_only=False), _offsets(lists)


def _offsets(lists: pyarrow.ListArray) -> npt.NDArray[Any]:
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)])


def read_summary(path: Path, treatments: Sequence[str] | None = None) -> pandas.DataFrame:
    """A summary table whose measured lists stay in the file, which has to stay as it is while the frame is used.

    Args:
        path: summary.parquet.
        treatments: Names of the treatments whose columns to read; None: all that are there.
    """
    import pyarrow.parquet

    stamp, file = path.stat().st_mtime_ns, pyarrow.parquet.ParquetFile(path)
    schema = file.schema_arrow
    known = {*summary_columns(treatments or ()), KEY}
    wanted = [name for name in schema.names if treatments is None or name in known]
    stored = [name for name in wanted if name not in RECORD_COLUMNS and pyarrow.types.is_list(schema.field(name).type)]
    frame = pandas.read_parquet(path, columns=[name for name in wanted if name not in stored])
    ends = tuple(np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]).tolist())
    for name in stored:
        frame[name] = StoredLists(path, name, stamp, ends, np.arange(len(frame)))
    return frame[wanted]
