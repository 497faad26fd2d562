"""Threads that write while training goes on.

Two, since hashing, measuring and writing release Python's lock while they work on a tensor's bytes. Tasks start in the
order they were handed over, so a task may wait for one that was handed over before it. What waits is bounded by the
arena, in which every task holds a lease.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from megatron.quantscope.capture.files import skip_zip_checksums

THREADS = 2

Task = Callable[[], None]


class BackgroundWriter:
    """Runs tasks on daemon threads.

    Args:
        on_error: Called, on a writer's thread, with the exception of a task that failed.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"capture-writer-{index}", daemon=True) for index in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Run `task` on a writer's thread."""
        self._tasks.put(task)

    def close(self) -> None:
        """Wait for every task and end the threads; idempotent."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self) -> None:
        skip_zip_checksums()
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # whatever it is, the session has to know and training has to go on
                self._on_error(error)
            del task  # what it holds is to be freed before the next one comes
