"""One kept tensor as readers see it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.metadata import FIELDS, UNKNOWN, TensorMetadata, metadata_values
from megatron.quantscope.capture.names import CaptureName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron.quantscope.formats.statistics import TensorStatistics


@dataclass(frozen=True, kw_only=True)
class TensorRecord(TensorMetadata):
    """A row of a manifest, or a bare file that no manifest lists; every field of `TensorMetadata` beside these.

    Attributes:
        path: The file that holds the tensor.
        bytes: Its size.
        checksum: `sha256:...` of the tensor's bytes; None for bare files.
        statistics: Of the tensor; None for bare files and for dtypes without real values.
        reference: Whether the file was written for an earlier row of the same content.
        counter: Order of the rows of one rank.
        committed: Whether the row's iteration was completed.
    """

    path: Path
    bytes: int
    checksum: str | None = None
    statistics: TensorStatistics | None = None
    reference: bool = False
    counter: int = 0
    committed: bool = True

    @classmethod
    def from_row(cls, row: Mapping[str, Any], path: Path, *, committed: bool) -> TensorRecord:
        """The record of a manifest row.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: when the row is not one that this tool writes.
        """
        from megatron.quantscope.formats.statistics import TensorStatistics

        statistics = row["statistics"]
        return cls(
            **metadata_values(row),
            path=path,
            bytes=row["bytes"],
            checksum=row["checksum"],
            statistics=TensorStatistics.from_json(statistics) if statistics is not None else None,
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
