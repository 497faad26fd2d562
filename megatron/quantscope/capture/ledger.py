"""What each iteration has on disk, and the moment when it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.quantscope.capture.errors import CaptureError


@dataclass
class Tally:
    """Rows, files and bytes; `bytes` of the files alone."""

    rows: int = 0
    files: int = 0
    bytes: int = 0

    def add_row(self, size: int | None) -> None:
        """Count one row, and the file of `size` bytes that it wrote; None: it has no file of its own."""
        self.rows += 1
        if size is not None:
            self.add_file(size)

    def add_file(self, size: int) -> None:
        """Count one file."""
        self.files += 1
        self.bytes += size


@dataclass
class _Iteration:
    tally: Tally
    pending: int = 0
    scalars: Mapping[str, float] | None = None  # None: the iteration is still running

    @property
    def complete(self) -> bool:
        return not self.pending and self.scalars is not None


class IterationLedger:
    """Counts rows from handing over to disk; iterations are committed in their order. Safe to use from several threads.

    Args:
        close: Called with a complete iteration; writes what waited for its end, and returns the sizes of those files.
        commit: Called after that, once an iteration, with the fields of the commit record.
    """

    def __init__(self, close: Callable[[int], Iterable[int]], commit: Callable[[Mapping[str, Any]], None]) -> None:
        self.total = Tally()
        self.committed = 0  # iterations
        self._close = close
        self._commit = commit
        self._lock = threading.Lock()
        self._committed = threading.Condition(self._lock)
        self._abandoned = False
        self._committing = threading.Lock()  # apart from the other, which the training thread takes
        self._iterations: dict[int, _Iteration] = {}
        self._last_ended = -1
        self._stuck = False

    @property
    def untouched(self) -> bool:
        """Whether no row came and no iteration ended."""
        return self._last_ended < 0 and not self._iterations

    @property
    def unfinished(self) -> list[int]:
        """The iterations that have rows and no commit record."""
        with self._lock:
            return list(self._iterations)

    def handed_over(self, iteration: int) -> None:
        """A row of `iteration` is on its way.

        Raises:
            CaptureError: when the iteration has ended, or one before it has not.
        """
        with self._lock:
            if iteration <= self._last_ended:
                raise CaptureError(f"a tensor of iteration {iteration} was shown after the iteration's end")
            open_before = [each for each in self._iterations if self._last_ended < each < iteration]
            if open_before:
                raise CaptureError(
                    f"a tensor of iteration {iteration} was shown before the end of iteration {open_before[0]}"
                )
            self._of(iteration).pending += 1

    def done(self, iteration: int, size: int | None) -> None:
        """A row of `iteration` is written; `size` as in `Tally.add_row`."""
        with self._lock:
            entry = self._of(iteration)
            entry.pending -= 1
            entry.tally.add_row(size)
            self.total.add_row(size)
        self._commit_complete()

    def announce_end(self, iteration: int) -> None:
        """No row of `iteration` follows."""
        with self._lock:
            self._last_ended = iteration
            self._of(iteration)  # takes its place in the order, also without a row

    def ended(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """The iteration's end as its turn comes on a writer's thread; `scalars` go into its commit record."""
        with self._lock:
            self._of(iteration).scalars = scalars
        self._commit_complete()

    def wait_for_those_before(self, iteration: int) -> None:
        """Return when every iteration before `iteration` is committed, or will not be."""
        with self._committed:
            self._committed.wait_for(lambda: self._abandoned or min(self._iterations, default=iteration) >= iteration)

    def abandon(self) -> None:
        """Nothing more is committed; nobody waits for it."""
        with self._committed:
            self._abandoned = True
            self._committed.notify_all()

    def add_files(self, sizes: Iterable[int]) -> None:
        """Count files that belong to an iteration which is not committed."""
        with self._lock:
            for size in sizes:
                self.total.add_file(size)

    def _of(self, iteration: int) -> _Iteration:
        return self._iterations.setdefault(iteration, _Iteration(Tally()))

    def _commit_complete(self) -> None:
        with self._committing:
            while not self._stuck and (first := self._first_complete()) is not None:
                self._stuck = True  # until it is committed: if that fails, what follows may refer to what is lost
                iteration, entry = first
                sizes = list(self._close(iteration))
                for size in sizes:
                    entry.tally.add_file(size)
                self.add_files(sizes)
                self._commit({"iteration": iteration, **vars(entry.tally), "scalars": dict(entry.scalars or {})})
                with self._lock:
                    del self._iterations[iteration]
                    self.committed += 1
                    self._committed.notify_all()
                self._stuck = False

    def _first_complete(self) -> tuple[int, _Iteration] | None:
        with self._lock:
            first = next(iter(self._iterations.items()), None)
            return first if first is not None and first[1].complete else None
