"""What each iteration has on disk, and the moment when it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.quantscope.capture.errors import CaptureError


@dataclass
class Tally:
    """Rows, files and bytes; `bytes` of the files alone."""

    rows: int = 0
    files: int = 0
    bytes: int = 0

    def add(self, size: int | None) -> None:
        """Count one row, and the file of `size` bytes that it wrote; None: it refers to an earlier file."""
        self.rows += 1
        if size is not None:
            self.files += 1
            self.bytes += size


@dataclass
class _Iteration:
    tally: Tally
    pending: int = 0
    scalars: Mapping[str, float] | None = None  # None: the iteration is still running


class IterationLedger:
    """Counts rows from handing over to disk. Safe to use from several threads.

    Args:
        commit: Called once an iteration, when it has ended and its last row is on disk, with the fields of the record.
    """

    def __init__(self, commit: Callable[[Mapping[str, Any]], None]) -> None:
        self.total = Tally()
        self.committed = 0  # iterations
        self._commit = commit
        self._lock = threading.Lock()
        self._iterations: dict[int, _Iteration] = {}
        self._last_ended = -1

    @property
    def untouched(self) -> bool:
        """Whether no row came and no iteration ended."""
        return self._last_ended < 0 and not self._iterations

    def handed_over(self, iteration: int) -> None:
        """A row of `iteration` is on its way.

        Raises:
            CaptureError: when the iteration has ended.
        """
        with self._lock:
            if iteration <= self._last_ended:
                raise CaptureError(f"a tensor of iteration {iteration} was shown after the iteration's end")
            self._of(iteration).pending += 1

    def on_disk(self, iteration: int, size: int | None) -> None:
        """A row of `iteration` is in the manifest; `size` as in `Tally.add`."""
        with self._lock:
            entry = self._of(iteration)
            entry.pending -= 1
            entry.tally.add(size)
            self.total.add(size)
            self._commit_if_complete(iteration)

    def ended(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """No row of `iteration` follows; `scalars` go into its commit record."""
        with self._lock:
            self._last_ended = iteration
            self._of(iteration).scalars = scalars
            self._commit_if_complete(iteration)

    def _of(self, iteration: int) -> _Iteration:
        return self._iterations.setdefault(iteration, _Iteration(Tally()))

    def _commit_if_complete(self, iteration: int) -> None:
        entry = self._iterations[iteration]
        if entry.pending or entry.scalars is None:
            return
        del self._iterations[iteration]
        self.committed += 1
        self._commit({"iteration": iteration, **vars(entry.tally), "scalars": dict(entry.scalars)})
