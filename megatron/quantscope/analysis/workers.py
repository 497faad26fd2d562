"""The pool of processes that an analysis runs in.

Workers are forked from a server process that has imported what they need and has no threads: each starts in
milliseconds with torch there, and no lock of this process (of a progress display, say) is copied in a held state. Each
computes on one thread, so that `n` workers take `n` cores. One worker means no process at all.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import forkserver
from typing import Any, TypeVar

from megatron.quantscope.formats.cpp_build import library

_PRELOADED = ["megatron.quantscope.analysis.scan"]
_AHEAD = 8  # tasks a worker that are in flight, so that none waits for the next while an earlier one is slow
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Runs functions over many tasks; made by `worker_pool`."""

    def __init__(self, count: int, executor: Executor | None) -> None:
        self.count = count
        self._executor = executor

    def map(self, function: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
        """The results in the order of the tasks. Function and tasks are pickled; few tasks are in flight at a time."""
        if self._executor is None:
            yield from map(function, tasks)
            return
        waiting = iter(tasks)
        running: deque[Future[_Result]] = deque()
        while True:
            running.extend(self._executor.submit(function, task) for task in islice(waiting, self._room(len(running))))
            if not running:
                return
            yield running.popleft().result()

    def _room(self, running: int) -> int:
        return max(0, self.count * _AHEAD - running)


def start_server(count: int) -> None:
    """Have the server that `count` workers are forked from import what they need, while this process does other things.

    A program that is about to need workers calls it before its own imports: both take a second, on two cores one.
    """
    if count > 1:
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()


@contextmanager
def worker_pool(
    count: int, *, initializer: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
) -> Iterator[Workers]:
    """`count` workers; `initializer(*arguments)` has run in each.

    On an error or an interrupt the tasks that have not begun are dropped.
    """
    if count == 1:
        with _one_thread():
            if initializer:
                initializer(*arguments)
            yield Workers(1, None)
        return
    library()  # built once, and its warning given once, rather than by every worker
    start_server(count)
    executor = ProcessPoolExecutor(count, multiprocessing.get_context("forkserver"), _start, (initializer, arguments))
    try:
        yield Workers(count, executor)
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    """Begin a worker: one thread, deaf to Ctrl-C, which is the parent's to answer, and gone when the parent is."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger(library.__module__).setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if initializer:
        initializer(*arguments)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
