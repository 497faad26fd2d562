"""Threads that write while training goes on, and the bound on what may wait for them.

The training thread reserves the bytes of a tensor before it copies it and hands the copy over; the bytes are free again
when the copy is written. When the bound is reached it waits: that is the back-pressure, and the only time the disk can
hold training up. A tensor larger than the bound is let through alone.

Two threads, since hashing and `torch.save` release Python's lock while they work on a tensor's bytes. Tasks start in
the order they were handed over, so a task may wait for one that was handed over before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

THREADS = 2

Task = Callable[[], None]


class BackgroundWriter:
    """Runs tasks on daemon threads. `reserve` and `submit` belong to one training thread.

    Args:
        limit_bytes: Bound of the bytes that are reserved and not yet written.
        on_error: Called, on a writer's thread, with the exception of a task that failed.
    """

    def __init__(self, limit_bytes: int, on_error: Callable[[Exception], None]) -> None:
        self.waited_seconds = 0.0  # of the training thread, for room
        self.peak_bytes = 0
        self._limit = limit_bytes
        self._on_error = on_error
        self._reserved = 0
        self._room = threading.Condition()
        self._tasks: queue.SimpleQueue[tuple[int, Task] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"capture-writer-{index}", daemon=True) for index in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def reserve(self, size: int) -> None:
        """Wait until `size` more bytes may be held."""
        with self._room:
            if self._full(size):
                start = time.perf_counter()
                self._room.wait_for(lambda: not self._full(size))
                self.waited_seconds += time.perf_counter() - start
            self._reserved += size
            self.peak_bytes = max(self.peak_bytes, self._reserved)

    def release(self, size: int) -> None:
        """Give back bytes that were reserved and will not be submitted."""
        with self._room:
            self._reserved -= size
            self._room.notify_all()

    def submit(self, size: int, task: Task) -> None:
        """Run `task` on a writer's thread; `size` reserved bytes are free when it has ended."""
        self._tasks.put((size, task))

    def close(self) -> None:
        """Wait for every task and end the threads; idempotent."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _full(self, size: int) -> bool:
        return self._reserved > 0 and self._reserved + size > self._limit

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            size, task = item
            try:
                task()
            except Exception as error:  # whatever it is, the session has to know and training has to go on
                self._on_error(error)
            finally:
                del item, task  # the tensor it holds is to be freed before its bytes are
                self.release(size)
