"""Reading a capture back: names and manifests first, tensors one by one when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import TEMPORARY_PREFIX
from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.folder_reader import FolderContent, holds_captures, read_folder
from megatron.quantscope.capture.folders_of_nodes import of_one_run
from megatron.quantscope.capture.full_tensor import LogicalTensors, full_tensor
from megatron.quantscope.capture.record import TensorRecord
from megatron.quantscope.capture.segment_file import map_tensor
from megatron.quantscope.capture.tensor_file import load_file

if TYPE_CHECKING:
    import pandas
    import torch

Directory = str | os.PathLike[str]
_PROBLEMS_NAMED = 3  # on one line
_IDENTITY = ("quant_type", "run_id", "rank", "counter", "path")  # columns that no two rows have alike
_STATISTICS = ("count", "zero", "nan", "inf", "min", "max", "amax", "mean", "rms", "std")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """An opened capture; holds no tensor. Where a method takes a record, it takes a row of `frame()` as well.

    Attributes:
        directory: What was opened; of several directories the one above them all.
        records: One a kept tensor, by quant type, rank and order of saving.
        problems: One line for everything that is broken, missing, foreign or not completed.
        commits: Quant type -> iteration -> scalars (loss, ...) of the completed iterations.
        run_info: Quant type -> what `run.json` says of the run that was read.
        runs: Quant type -> all its run ids, the oldest first.
    """

    directory: Path
    records: list[TensorRecord]
    problems: list[str] = field(default_factory=list)
    commits: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    run_info: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def quant_types(self) -> list[str]:
        """The quant types that have records, in the order of the records."""
        return list(dict.fromkeys(record.quant_type for record in self.records))

    def load(self, record: TensorRecord | pandas.Series) -> torch.Tensor:
        """The tensor of a record, on the CPU and memory-mapped, so that only what is looked at is read.

        What is written to it stays in memory; the file never changes.

        Raises:
            CaptureError: when its file is missing or damaged, and where only its statistics were kept.
        """
        record = self.record_of(record)
        if record.location is None:
            raise CaptureError(f"{record.title}: only its statistics were kept, by --tensor-save-mode statistics")
        return record.location.load()

    def block_exponents(self, record: TensorRecord | pandas.Series) -> torch.Tensor | None:
        """The largest exponent of every block of 32 elements along the last dimension; None where it was not kept.

        Returns:
            uint8, of the tensor's shape with ceil(n / 32) as the last dimension: floor(log2 amax) + 127 of the block, 0
            where it holds nothing but zeros and float32 subnormals, 255 where it holds a NaN or an Inf.

        Raises:
            CaptureError: when its file is missing or damaged.
        """
        record = self.record_of(record)
        if record.blocks is None or record.run_folder is None:
            return None
        path = record.run_folder / record.blocks["file"]
        return map_tensor(path, record.blocks["offset"], record.blocks["shape"], "uint8")

    def full_tensor(self, record: TensorRecord | pandas.Series, *, unscaled: bool = True) -> torch.Tensor:
        """The whole of which a record holds one rank's part (`full_tensor.full_tensor`)."""
        return full_tensor(self, self.record_of(record), unscaled=unscaled)

    def describe(self, record: TensorRecord | pandas.Series) -> TensorRecord:
        """The record of a bare file completed by the metadata inside it; others are complete already.

        Names of the two older forms count more than the metadata, which calls gradients as those names do.

        Raises:
            CaptureError: when its file is missing or damaged.
        """
        record = self.record_of(record)
        if not record.bare or record.path is None:
            return record
        tensor, metadata = load_file(record.path)
        known = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        return record.with_metadata({**metadata, **known}, overrides=record.iteration is not None)

    def record_of(self, row: TensorRecord | pandas.Series) -> TensorRecord:
        """The record that a row of `frame()` shows; a record is its own.

        Raises:
            CaptureError: for a row that is not of this capture.
        """
        if isinstance(row, TensorRecord):
            return row
        try:
            return self._by_identity[tuple(_known(row[name]) for name in _IDENTITY)]
        except KeyError:
            raise CaptureError(f"no such row in {self.directory}: give a record, or a row of frame()") from None

    @cached_property
    def logical(self) -> LogicalTensors:
        """The records, grouped by what they are parts of."""
        return LogicalTensors(self.records)

    @cached_property
    def _by_identity(self) -> dict[tuple[Any, ...], TensorRecord]:
        return {
            (record.quant_type, record.run_id, record.rank, record.counter, _text(record.path)): record
            for record in self.records
        }

    def frame(self) -> pandas.DataFrame:
        """A table of all records: metadata, parallel coordinates as columns of their own, and scalar statistics."""
        import pandas

        frame = pandas.DataFrame([_frame_row(record) for record in self.records])
        return frame.astype({"offset": "Int64"})  # whole, also beside rows without one


def open_capture(
    directory: Directory | Sequence[Directory], *, run: str | None = None, quant_types: Sequence[str] | None = None
) -> Capture:
    """Open a capture without reading a tensor.

    Args:
        directory: A capture root (type folders below it), one type folder, or any folder of captured files; or several
            of them, one a node, where each node kept the tensors of its ranks in a directory of its own.
        run: Which run to read; None: of every type the latest that kept anything.
        quant_types: Which types to read; None: all.

    Raises:
        CaptureError: when there is no such directory, or nothing captured in it, or not that run or type, or when two
            directories hold the same rank of a run.
    """
    roots = _roots([directory] if isinstance(directory, str | os.PathLike) else directory)
    contents = {folder: content for root in roots for folder, content in _read_folders(root, run).items()}
    if len(roots) > 1:
        contents = of_one_run(contents, run)
    capture = Capture(directory=_above(roots), records=[])
    for folder, content in contents.items():
        name = _name_in(folder, capture.directory, several=len(roots) > 1)
        capture.problems.extend(f"{name}{problem}" for problem in content.problems)
        capture.records.extend(content.records)
        if content.run_ids:
            quant_type = content.quant_type(folder)
            known = capture.runs.get(quant_type)
            capture.runs[quant_type] = content.run_ids if known is None else sorted({*known, *content.run_ids})
            if content.run is not None:
                capture.run_info.setdefault(quant_type, content.run_info)
                capture.commits[quant_type] = content.commits | capture.commits.get(quant_type, {})
    if run is not None and not any(content.run == run for content in contents.values()):
        raise CaptureError(f"no run {run} in {capture.directory}: there are {_listing(_all(contents.values()))}")
    if not capture.records:
        raise CaptureError(f"no captures in {capture.directory}" + _first_of(capture.problems))
    if len(roots) > 1:
        capture.records.sort(key=lambda record: (record.rank or 0, record.counter))
    capture.records.sort(key=lambda record: record.quant_type)  # stable: rank and counter stay in order
    return capture if quant_types is None else _of_types(capture, quant_types)


def _roots(directories: Sequence[Directory]) -> list[Path]:
    """The only directory as it was given; several as absolute paths, each once however often it is spelled."""
    if len(directories) == 1:
        return [Path(directories[0])]
    return [Path(path) for path in dict.fromkeys(map(os.path.realpath, directories))]


def _above(roots: Sequence[Path]) -> Path:
    """The only root as it was given, else the directory above them all."""
    if not roots:
        raise CaptureError("no directory to read a capture from")
    return roots[0] if len(roots) == 1 else Path(os.path.commonpath([root.absolute() for root in roots]))


def _name_in(folder: Path, directory: Path, *, several: bool) -> str:
    """What goes before a problem of `folder`."""
    if several:
        return f"{folder.absolute().relative_to(directory)}/"
    return "" if folder == directory else f"{folder.name}/"


def _first_of(problems: Sequence[str]) -> str:
    """What was found instead of captures, on one line, the first few of it."""
    more = f"; and {len(problems) - _PROBLEMS_NAMED} more" if len(problems) > _PROBLEMS_NAMED else ""
    return f": {'; '.join(problems[:_PROBLEMS_NAMED])}{more}" if problems else ""


def capture_folders(root: Path) -> list[Path]:
    """The folders that hold captured files: `root` itself and those one below it.

    Raises:
        OSError: when one can not be read.
    """
    below = sorted(path for path in root.iterdir() if path.is_dir())
    named = (path for path in below if path.name != RUNS_FOLDER and not path.name.startswith(TEMPORARY_PREFIX))
    return [folder for folder in (root, *named) if holds_captures(folder)]


def _read_folders(root: Path, run: str | None) -> dict[Path, FolderContent]:
    try:
        found = {folder: read_folder(folder, run) for folder in capture_folders(root)}
    except FileNotFoundError as error:
        raise CaptureError(f"no such directory: {error.filename or root}") from None
    except OSError as error:
        raise CaptureError(f"can not read {error.filename or root}: {error.strerror or error}") from error
    if not found:
        raise CaptureError(f"no captures in {root}: neither .pt files nor folders of them")
    return found


def _of_types(capture: Capture, quant_types: Sequence[str]) -> Capture:
    missing = [quant_type for quant_type in quant_types if quant_type not in capture.quant_types]
    if missing:
        raise CaptureError(
            f"no captures of type {missing[0]} in {capture.directory}: there are {_listing(capture.quant_types)}"
        )
    return Capture(
        directory=capture.directory,
        records=[record for record in capture.records if record.quant_type in quant_types],
        problems=capture.problems,
        commits={key: value for key, value in capture.commits.items() if key in quant_types},
        run_info={key: value for key, value in capture.run_info.items() if key in quant_types},
        runs={key: value for key, value in capture.runs.items() if key in quant_types},
    )


def _all(contents: Iterable[FolderContent]) -> list[str]:
    return sorted({run for content in contents for run in content.run_ids})


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _frame_row(record: TensorRecord) -> dict[str, Any]:
    row = record.to_dict()
    row |= row.pop("parallel")
    row |= {name: getattr(record.statistics, name, None) for name in _STATISTICS}
    return row | {
        "path": _text(record.path),
        "store": record.store,
        "offset": record.offset,
        "bytes": record.bytes,
        "checksum": record.checksum,
        "reference": record.reference,
        "counter": record.counter,
        "committed": record.committed,
    }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _known(cell: Any) -> Any:
    """A cell; None for what pandas puts where there is nothing."""
    import pandas

    return None if pandas.isna(cell) else cell
