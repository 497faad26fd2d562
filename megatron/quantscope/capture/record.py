"""One kept tensor as readers see it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.coordinates import STAMP_FORMAT
from megatron.quantscope.capture.location import Location
from megatron.quantscope.capture.metadata import FIELDS, SAVE_TIME_FORMAT, UNKNOWN, TensorMetadata, metadata_values
from megatron.quantscope.capture.names import CaptureName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron.quantscope.formats.statistics import TensorStatistics

_PARTS = tuple(field.name for field in fields(CaptureName) if field.name != "stamp")
PT, SEGMENT, NO_STORE = "pt", "segment", "none"  # where a row's tensor is kept; NO_STORE: only its statistics are


@dataclass(frozen=True, kw_only=True)
class TensorRecord(TensorMetadata):
    """A row of a manifest, or a bare file that no manifest lists; every field of `TensorMetadata` beside these.

    Attributes:
        store: "pt": in a file of its own; "segment": among others in a file of the run; "none": only statistics were
            kept.
        path: The file that holds the tensor; None: no file does.
        offset: Of its elements in a segment.
        bytes: Size of the `pt` file; of the tensor in a segment.
        checksum: `ALGORITHM:...` of the tensor's bytes; None for bare files and where no tensor was kept.
        statistics: Of the tensor; None for bare files and for dtypes without real values.
        blocks: Where the map of block exponents lies and what it holds, as in the manifest; None: there is none.
        run_folder: The folder of the run; None for bare files.
        reference: Whether the bytes were written for an earlier row of the same content.
        counter: Order of the rows of one rank.
        committed: Whether the row's iteration was completed.
    """

    store: str = PT
    path: Path | None
    offset: int | None = None
    bytes: int
    checksum: str | None = None
    statistics: TensorStatistics | None = None
    blocks: dict[str, Any] | None = None
    run_folder: Path | None = None
    reference: bool = False
    counter: int = 0
    committed: bool = True

    @classmethod
    def from_row(cls, row: Mapping[str, Any], folder: Path, run_folder: Path, *, committed: bool) -> TensorRecord:
        """The record of a manifest row.

        Args:
            row: What the line says, as of schema 2.
            folder: The type folder.
            run_folder: The run's.
            committed: As the attribute.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: when the row is not one that this tool writes.
        """
        from megatron.quantscope.formats.statistics import TensorStatistics

        statistics = row["statistics"]
        folders = {PT: folder, SEGMENT: run_folder}
        return cls(
            **metadata_values(row),
            store=row["store"],
            path=folders[row["store"]] / row["file"] if row["store"] in folders else None,
            offset=row["offset"],
            bytes=row["bytes"],
            checksum=row["checksum"],
            statistics=TensorStatistics.from_json(statistics) if statistics is not None else None,
            blocks=row["blocks"],
            run_folder=run_folder,
            reference=row["reference"],
            counter=row["counter"],
            committed=committed,
        )

    @classmethod
    def from_name(cls, name: CaptureName, path: Path, size: int) -> TensorRecord:
        """The record of a bare file: what its name tells."""
        return cls(
            path=path,
            bytes=size,
            counter=name.counter,
            rank=name.rank,
            sample_idx=name.sample_idx,
            iteration=name.iteration,
            layer_type=name.layer_type,
            operation=name.operation,
            quant_type=name.quant_type,
            tensor_name=name.canonical_tensor_name,
            layer_idx=name.layer_idx,
            phase=name.phase or UNKNOWN,
            component=name.component or UNKNOWN,
        )

    @property
    def bare(self) -> bool:
        """Whether no manifest lists it."""
        return self.run_folder is None

    @property
    def location(self) -> Location | None:
        """Where its elements lie; None: only its statistics were kept."""
        if self.path is None:
            return None
        if self.offset is None:
            return Location(self.path)
        return Location(self.path, self.offset, self.shape or (), self.dtype or "")

    @property
    def name(self) -> CaptureName:
        """The name of the `pt` file that the row has, or would have."""
        return CaptureName(
            stamp=datetime.strptime(self.save_time or "", SAVE_TIME_FORMAT).strftime(STAMP_FORMAT),
            **{name: getattr(self, name) for name in _PARTS},
        )

    @property
    def title(self) -> str:
        """What an error message calls it."""
        known = (("iteration", self.iteration), ("rank", self.rank), ("sample", self.sample_idx))
        where = ", ".join(f"{name} {value}" for name, value in known if value is not None)
        what = f"{self.operation} {self.tensor_name} of {self.module or self.layer_type}"
        return f"{what} ({where})" if where else what

    def with_metadata(self, metadata: Mapping[str, Any], *, overrides: bool) -> TensorRecord:
        """This record with what the metadata inside its file says.

        Args:
            metadata: The file's.
            overrides: Whether it counts more than what is known already; otherwise it only fills gaps.
        """
        given = metadata_values(metadata)
        if not overrides:
            given = {name: value for name, value in given.items() if getattr(self, name) in (None, UNKNOWN, (), {})}
        extra = {name: value for name, value in metadata.items() if name not in FIELDS}
        return replace(self, **given, extra=self.extra | extra)
