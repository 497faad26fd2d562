"""What a running trainer has kept so far, read from the manifests that its ranks append to.

Only new lines are read, so looking costs the same at the millionth tensor as at the first. The folders of runs that
were there before are not this run's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNS_FOLDER = "runs"
MANIFESTS = "manifest_rank*.jsonl"
RUN_NAME = re.compile(r"\d{8}_\d{6}_[0-9A-Za-z]+")


@dataclass
class Collected:
    """What has been kept, over all ranks of a run.

    Attributes:
        rows: Tensor rows.
        files: Files of their tensors.
        file_bytes: Of these files.
        samples: (iteration, first sample) of every micro-batch seen.
        scalars: Committed iteration -> its scalars, such as "lm loss".
        stopped: Why collecting ended early, one line a rank that said so.
        bad_lines: Manifest lines that could not be read.
    """

    rows: int = 0
    files: int = 0
    file_bytes: int = 0
    samples: set[tuple[int, int]] = field(default_factory=set)
    scalars: dict[int, dict[str, float]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    bad_lines: int = 0

    @property
    def iterations(self) -> int:
        """Iterations that are complete."""
        return len(self.scalars)

    @property
    def micro_batches(self) -> int:
        """Micro-batches kept, over all data-parallel ranks."""
        return len(self.samples)

    @property
    def loss(self) -> float | None:
        """The loss of the last complete iteration."""
        return self.scalars[max(self.scalars)].get("lm loss") if self.scalars else None

    def add(self, row: dict[str, Any]) -> None:
        """Count one line of a manifest.

        Raises:
            ValueError, KeyError, TypeError: It is not one; nothing was counted then.
        """
        kind = row.get("kind")
        if kind == "tensor":
            sample, own_file = (row["iteration"], row["sample_idx"]), row["store"] == "pt" and not row["reference"]
            file_bytes = int(row["bytes"]) if own_file else 0
            self.rows += 1
            self.samples.add(sample)
            self.files += own_file
            self.file_bytes += file_bytes
        elif kind == "segment":
            file_bytes = int(row["bytes"])
            self.files += 1
            self.file_bytes += file_bytes
        elif kind == "commit":
            self.scalars.setdefault(row["iteration"], {}).update(row.get("scalars") or {})
        elif kind == "stopped":
            self.stopped.append(str(row.get("reason")))


class ManifestWatch:
    """Follows the manifests of the runs that begin in a type folder after this object was made."""

    def __init__(self, type_folder: Path) -> None:
        self._runs = type_folder / RUNS_FOLDER
        self._before = {path.name for path in self._run_folders()}
        self._offsets: dict[Path, int] = {}
        self.collected = Collected()

    def poll(self) -> bool:
        """Read what was appended since the last call; whether there was anything."""
        before = self.collected.rows, len(self.collected.scalars)
        for folder in self.run_folders():
            for path in folder.glob(MANIFESTS):
                self._read(path)
        return (self.collected.rows, len(self.collected.scalars)) != before

    def run_folders(self) -> list[Path]:
        """The folders of this run: one, unless the trainer was started again by its launcher."""
        return [path for path in self._run_folders() if path.name not in self._before]

    def _run_folders(self) -> list[Path]:
        if not self._runs.is_dir():
            return []
        return sorted(path for path in self._runs.iterdir() if RUN_NAME.fullmatch(path.name) and path.is_dir())

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._offsets[path] = self._offsets.get(path, 0) + len(line)
                try:
                    self.collected.add(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    self.collected.bad_lines += 1
