"""Runs a program in a process group of its own and leaves no process behind, however it ends.

A trainer is a tree: torchrun, its ranks (which torchrun puts into sessions of their own), their data workers. A signal
to the group alone misses some of them, so what is stopped is every descendant that was seen while the program ran. The
program is interrupted first (SIGINT), so that it can finish what it writes and end its own; then all that are left are
asked to end (SIGTERM) and, after a grace period, ended (SIGKILL).

Ctrl-C, SIGTERM and a closed terminal reach the driver only, as the exception Interrupted; the `with` block of
RunningProgram turns any exception into an orderly stop.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

import psutil

TIDY_SECONDS = 5.0
GRACE_SECONDS = 10.0
KILL_SECONDS = 2.0  # for the system to end what was killed
SWEEP_SECONDS = 1.0  # how often descendants are looked for
DRAIN_SECONDS = 2.0  # for the last lines of a program that has ended
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_EXIT_BASE = 128  # as shells count


class Interrupted(BaseException):
    """The driver was told to stop; not an Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = SIGNAL_EXIT_BASE + number


class _StopSignals:
    """Turns stop signals into Interrupted, at once or at the end of a block that must not be left half done."""

    def __init__(self) -> None:
        self._blocks = 0
        self._waiting: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if not self._blocks:
            raise Interrupted(number)
        self._waiting = number

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Raise what comes during the block after it."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            number, self._waiting = self._waiting, None
        if number is not None:
            raise Interrupted(number)


_stop_signals = _StopSignals()


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Raise Interrupted in the main thread when a stop signal comes; the former handlers come back afterwards."""
    former = {number: signal.signal(number, _stop_signals.handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class RunningProgram:
    """A program that runs while the `with` block does.

    With a log, its output (both streams) goes there, and line by line to whoever asks for `lines`; without one it goes
    where the driver's own output goes.
    """

    def __init__(self, command: Sequence[str], *, log: Path | None = None) -> None:
        self._command = list(command)
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        self._descendants: dict[int, psutil.Process] = {}
        self._last_sweep = 0.0

    def __enter__(self) -> RunningProgram:
        with _stop_signals.put_off():  # a program that was started has to be known, or it could not be stopped
            self._log_file = self._log.open("w", encoding="utf-8") if self._log is not None else None
            output = subprocess.PIPE if self._log is not None else None
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _stop_signals.put_off():
            self._stop()
            self._reader.join(DRAIN_SECONDS)
            if self._log_file is not None:
                self._log_file.close()

    @property
    def returncode(self) -> int:
        """The exit code of the program that has ended; 128 + the signal's number if one ended it."""
        code = self._process.wait()
        return code if code >= 0 else SIGNAL_EXIT_BASE - code

    def lines(self, wait_seconds: float) -> list[str] | None:
        """The lines printed since the last call, after at most `wait_seconds`; None once the program has ended."""
        self._sweep()
        lines: list[str] = []
        with suppress(queue.Empty):
            lines.append(self._lines.get(timeout=wait_seconds))
            while True:  # until the queue is empty
                lines.append(self._lines.get_nowait())
        if not lines and self._process.poll() is not None:
            self._reader.join(DRAIN_SECONDS)  # a process it left behind may hold the pipe open
            return None if self._lines.empty() else []
        return lines

    def _read(self) -> None:
        if self._process.stdout is None or self._log_file is None:
            return
        for line in self._process.stdout:
            with suppress(ValueError):  # the log is closed: a straggler writes after the stop
                self._log_file.write(line)
                self._log_file.flush()
            self._lines.put(line.rstrip("\n"))

    def _sweep(self) -> None:
        """Remember every descendant; one that loses its parent can not be found later."""
        now = time.monotonic()
        if now - self._last_sweep < SWEEP_SECONDS:
            return
        self._last_sweep = now
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                self._descendants.setdefault(process.pid, process)

    def _stop(self) -> None:
        """End the program and everything it started."""
        self._last_sweep = 0.0
        self._sweep()
        descendants = list(self._descendants.values())
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TIDY_SECONDS)
        self._process.terminate()  # does nothing to one that has ended
        for process in descendants:
            with suppress(psutil.NoSuchProcess):  # psutil knows a reused number from the process it saw
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        stubborn = psutil.wait_procs(descendants, timeout=max(0.0, deadline - time.monotonic()))[1]
        for process in stubborn:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the program itself, and what it started since the last look
        self._process.wait()
        psutil.wait_procs(stubborn, timeout=KILL_SECONDS)
