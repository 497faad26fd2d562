"""What was measured already: rows on disk, so that a second run, or a run after a kill, reads only what is new.

While a scan goes on its rows are put away a few hundred at a time:

    OUT/.analysis/part-*.parquet    rows as they were measured, each file complete or absent
    OUT/summary.parquet             at the end: the rows of this run's records in their order, gathered from the parts
                                    and from the summary of the run before

So an interrupt costs nothing, and a kill the part that was not written yet. A row counts when its `key` (`identity`)
is that of a record and it has every treatment that is asked for; more treatments do not harm. What a restricted call
(a filter, a choice of formats) leaves out is not lost: a summary that holds more becomes a part before the narrower one
takes its place. A call that is not restricted ends with the summary alone.

No row is held longer than until its part is written; of all of them only the keys are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from megatron.quantscope.analysis.format_errors import Treatment
from megatron.quantscope.analysis.identity import KEY
from megatron.quantscope.analysis.replaced_files import replaced, unfinished
from megatron.quantscope.analysis.tables import RECORD_COLUMNS, Row, record_row, summary_columns, write_table
from megatron.quantscope.capture.record import TensorRecord

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

SUMMARY_TABLE, PARTS_FOLDER = "summary.parquet", ".analysis"
_PART_ROWS, _PART_SECONDS = 256, 10.0  # a part is written when it has so many rows or was begun so long ago
_GROUP_ROWS = 256  # rows of the summary that are looked up, and later read, at a time
_ABANDONED_SECONDS = 600.0
_FROM_FILE = ("shape", "dtype")  # columns in which the file's own word counts, not the manifest's


class _Place(NamedTuple):
    """Where a row lies: its table, row group, and row in that group."""

    path: Path
    group: int
    row: int


class RowStore:
    """The rows of one output directory; a context that puts away what it still holds when it ends.

    Args:
        target: The output directory.
        treatments: What every row has to have.
        restricted: Whether records or treatments are a choice, so that rows that are not needed now are to be kept.
    """

    def __init__(self, target: Path, treatments: Iterable[Treatment], *, restricted: bool = False) -> None:
        self._summary, self._folder = target / SUMMARY_TABLE, target / PARTS_FOLDER
        self._columns: Mapping[str, str] = {**summary_columns(one.name for one in treatments), KEY: "string"}
        self._restricted = restricted
        self._places: dict[str, _Place] = {}
        self._waiting: list[Row] = []
        self._begun = time.monotonic()
        self._row_group = lru_cache(maxsize=2)(_row_group)  # rows come mostly in order: of one part and the next
        _clear_unfinished(self._folder, self._summary.parent)
        found = [path for path in (self._summary, *sorted(self._folder.glob("part-*.parquet"))) if path.is_file()]
        self._sources = [path for path in found if self._take_in(path)]

    def __enter__(self) -> RowStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def __contains__(self, key: str | None) -> bool:
        return key in self._places

    def add(self, row: Row) -> None:
        """Take a row in; once a few hundred are there, or some seconds have gone by, they are written."""
        self._waiting.append(row)
        if len(self._waiting) >= _PART_ROWS or time.monotonic() - self._begun > _PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._waiting:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"part-{time.time_ns()}-{os.getpid()}.parquet"
            write_table(path, self._waiting, self._columns)
            self._waiting = []
            self._sources.append(path)
            self._take_in(path)
        self._begun = time.monotonic()

    def gather(self, records: Sequence[TensorRecord], keys: Sequence[str | None]) -> int:
        """Write summary.parquet: a row a record that a row is known of, in this order. Complete or absent.

        Args:
            records: All that were to be read.
            keys: Of each.

        Returns:
            How many rows; where there is none, the summary of a run before is left as it was.
        """
        self.flush()
        keyed = zip(records, keys, strict=True)
        known = [(record, key) for record, key in keyed if key is not None and key in self._places]
        if not known:
            return 0
        groups = (known[start : start + _GROUP_ROWS] for start in range(0, len(known), _GROUP_ROWS))
        with replaced(self._summary) as temporary:
            _write(temporary, (self._gathered(group) for group in groups))
            covered = frozenset(key for _, key in known)
            if self._summary in self._sources and not self._is_covered(self._summary, covered):
                self._put_away()
        self._clear(covered)
        return len(known)

    def _gathered(self, group: Sequence[tuple[TensorRecord, str]]) -> pyarrow.Table:
        """The rows of these records, as one table; of those that a manifest lists, with what it says of them."""
        import pyarrow

        places = [self._places[key] for _, key in group]
        order = sorted(range(len(group)), key=places.__getitem__)
        parts = []
        for (path, number), members in groupby(order, key=lambda index: places[index][:2]):
            rows = pyarrow.array([places[index].row for index in members])
            parts.append(self._row_group(path, number, tuple(self._columns)).take(rows))
        back = sorted(range(len(order)), key=order.__getitem__)
        table = pyarrow.concat_tables(parts).take(pyarrow.array(back))
        names = [name for name in RECORD_COLUMNS if name != KEY]
        own = [
            row if record.bare else record_row(record) | {name: row[name] for name in _FROM_FILE}
            for (record, _), row in zip(group, table.select(names).to_pylist(), strict=True)
        ]
        schema = pyarrow.schema([table.schema.field(name) for name in names])
        fresh = pyarrow.Table.from_pylist(own, schema=schema)
        for name in names:
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), fresh[name])
        return table

    def _take_in(self, path: Path) -> bool:
        """Note the keys of a table that has all that is asked for; whether it is one of this program's at all."""
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
            columns = set(file.schema_arrow.names)
            if KEY not in columns:
                raise pyarrow.ArrowInvalid("not written by this program")
            if columns >= self._columns.keys():
                for number in range(file.num_row_groups):
                    keys = file.read_row_group(number, columns=[KEY])[KEY].to_pylist()
                    self._places |= {key: _Place(path, number, row) for row, key in enumerate(keys)}
        except (OSError, pyarrow.ArrowException) as error:
            logger.warning("%s: %s, left out", path, str(error).partition("\n")[0])
            return False
        return True

    def _put_away(self) -> None:
        """Keep the summary that is to be replaced as a part, named by its content: the same one is kept once."""
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(self._summary)
        content = [file.schema_arrow.names, file.read(columns=[KEY])[KEY].to_pylist()]
        name = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
        self._folder.mkdir(exist_ok=True)
        os.replace(self._summary, self._folder / f"part-{name}.parquet")

    def _is_covered(self, path: Path, keys: Collection[str]) -> bool:
        """Whether a table holds nothing that is to be kept beside a summary with these keys."""
        import pyarrow.parquet

        if not self._restricted:
            return True
        file = pyarrow.parquet.ParquetFile(path)
        if not self._columns.keys() >= set(file.schema_arrow.names):
            return False
        return all(key in keys for key in file.read(columns=[KEY])[KEY].to_pylist())

    def _clear(self, keys: Collection[str]) -> None:
        """Remove the parts that the summary has taken in; nothing else that may lie there."""
        for path in self._sources:
            if path != self._summary and self._is_covered(path, keys):
                path.unlink(missing_ok=True)
        self._sources = [path for path in self._sources if path.exists()]
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()


def _clear_unfinished(*folders: Path) -> None:
    """Remove what killed runs were writing; what another run is writing just now is younger."""
    for folder in folders:
        for path in unfinished(folder, ".parquet"):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)


def _row_group(path: Path, number: int, columns: tuple[str, ...]) -> pyarrow.Table:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path).read_row_group(number, columns=list(columns)).select(list(columns))


def _write(path: Path, tables: Iterator[pyarrow.Table]) -> None:
    import pyarrow.parquet

    first = next(tables)
    with pyarrow.parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
