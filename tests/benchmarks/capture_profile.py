"""Where capture's time goes, function by function: of the training thread within its calls, and of all other threads.

A function's own time is what passes between the events of its thread's profile hook while it is on top of the stack;
a C function that is called is a function of its own. The hook costs about a microsecond an event, which small functions
called often feel most, so the totals are taken from steps that are not profiled. Threads that Python did not start do
not show.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tests.benchmarks.capture_model import Trainer
from tests.benchmarks.capture_rounds import Mode, open_session, take_files, wait_for
from tests.benchmarks.capture_watch import Stopwatch, Tap, WatchedSession, What

LINES = 25
US = 1e6
MS = 1e3

_PUSH, _POP = ("call", "c_call"), ("return", "c_return", "c_exception")


@dataclass
class OwnTime:
    """Of one function: how often it was called, and seconds spent in itself."""

    calls: int = 0
    cpu: float = 0.0
    wall: float = 0.0


@dataclass
class _Stack(threading.local):
    names: list[CodeType | str] = field(default_factory=list)
    cpu: float = 0.0
    wall: float = 0.0


class FunctionTimes:
    """A profile hook; `of` maps a function to its times, one map for the main thread and one for all others."""

    def __init__(self) -> None:
        self.of: dict[bool, dict[CodeType | str, OwnTime]] = {True: defaultdict(OwnTime), False: defaultdict(OwnTime)}
        self._stack = _Stack()
        self._main = threading.main_thread()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Charge the time since the event before to the function on top."""
        cpu, wall = time.thread_time(), time.perf_counter()
        stack = self._stack
        times = self.of[threading.current_thread() is self._main]
        if stack.names:
            own = times[stack.names[-1]]
            own.cpu += cpu - stack.cpu
            own.wall += wall - stack.wall
        if event in _PUSH:
            name = frame.f_code if event == "call" else _c_name(argument)
            stack.names.append(name)
            times[name].calls += 1
        elif stack.names:
            stack.names.pop()
        stack.cpu, stack.wall = time.thread_time(), time.perf_counter()

    def forget_stack(self) -> None:
        """The hook was taken away in the middle of a call."""
        self._stack.names.clear()


class ProfiledCalls:
    """An observer that profiles every call of the training thread into capture."""

    def __init__(self, times: FunctionTimes) -> None:
        self._times = times

    def tap(self, inner: Tap, where: dict[str, Any], what: What, tensor: torch.Tensor) -> None:
        """Profile the tap."""
        self.call(inner, *what, tensor)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Profile the call."""
        sys.setprofile(self._times)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)
            self._times.forget_stack()


def print_profile(mode: Mode, trainer: Trainer, steps: int, shown: int, directory: Path) -> None:
    """Train `steps` steps plainly for the totals and as many profiled, and print both."""
    rows = _print_totals(mode, trainer, steps, shown, directory)
    times = FunctionTimes()
    threading.setprofile(times)  # of the threads that the session starts
    try:
        with open_session(mode, directory) as session:
            watched = WatchedSession(session, ProfiledCalls(times))
            trainer.watch(watched)
            for number in range(steps):
                trainer.step(watched)
                wait_for(session, number + 1)
                take_files(directory)
    finally:
        threading.setprofile(None)
    for main, title in ((True, "training thread, within capture"), (False, "other threads")):
        _print_functions(title, times.of[main], rows * steps)


def _print_totals(mode: Mode, trainer: Trainer, steps: int, shown: int, directory: Path) -> int:
    """What a step costs without a profile; returns the rows of a step."""
    stopwatch = Stopwatch(shown)
    blocked = copied = others = 0.0
    with open_session(mode, directory) as session:
        watched = WatchedSession(session, stopwatch)
        trainer.watch(watched)
        for number in range(steps + 1):
            stopwatch.start_step()
            cpu, own = time.process_time(), time.thread_time()
            trainer.step(watched)
            wait_for(session, number + 1)
            if number:
                others += time.process_time() - cpu - (time.thread_time() - own)
                blocked, copied = blocked + stopwatch.blocked.wall, copied + stopwatch.copied.wall
            take_files(directory)
    rows = stopwatch.rows
    print(f"{mode.name}: {rows} rows, {stopwatch.bytes / 1e6:.1f} MB a step; unprofiled, the mean of {steps} steps")
    for what, seconds in (
        ("training thread blocked", blocked),
        ("memcpy of the same tensors", copied),
        ("CPU of all other threads", others),
    ):
        print(f"  {what:28} {seconds / steps * MS:8.1f} ms a step {seconds / steps / rows * US:8.1f} us a row")
    return rows


def _print_functions(title: str, times: dict[CodeType | str, OwnTime], rows: int) -> None:
    total = OwnTime(cpu=sum(own.cpu for own in times.values()), wall=sum(own.wall for own in times.values()))
    print(f"\n{title}: {total.cpu / rows * US:.1f} us of CPU a row, {total.wall / rows * US:.1f} us of wall time")
    print(f"  {'CPU us/row':>10} {'wall us/row':>11} {'calls/row':>9}")
    for name, own in sorted(times.items(), key=lambda item: -item[1].cpu)[:LINES]:
        print(f"  {own.cpu / rows * US:10.2f} {own.wall / rows * US:11.2f} {own.calls / rows:9.2f}  {_label(name)}")


def _label(name: CodeType | str) -> str:
    if isinstance(name, str):
        return name
    folder, file = os.path.split(name.co_filename)
    return f"{name.co_name} ({os.path.basename(folder)}/{file}:{name.co_firstlineno})"


def _c_name(function: Any) -> str:
    owner = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or repr(function)
    return f"<{owner}.{name}>" if owner else f"<{name}>"
