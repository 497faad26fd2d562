"""`--exit-signal-handler`: a signal that asks the run to end, and is obeyed when the iteration is complete.

Schedulers announce the end of a job by a signal, some time before they kill it. The handler notes it, and after each
iteration the ranks ask each other whether one has got it (the signal reaches them at different moments, or only some of
them); then all save a checkpoint and end with exit code 0.

A scheduler may signal every process of a job and a launcher pass its own signal on, so a rank can get it twice at once;
but someone who asks again means it. Hence a second signal ends the process as it would have without the handler, unless
it comes within a few seconds of the first.

SIGTERM is also what the capture flushes at (`quantscope.capture.termination`), unless someone else handles it. With the
handler the run ends by itself, and the capture with it.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SAME_SIGNAL_S = 5.0


class ExitSignal:
    """Watches for one signal while it is entered.

    Args:
        name: Of the signal, such as SIGTERM; None: nothing is watched for.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._number = None if name is None else getattr(signal, name)
        self._first: float | None = None
        self._before: Any = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ExitSignal:
        """As the flags say."""
        return cls(args.exit_signal if args.exit_signal_handler else None)

    def __enter__(self) -> ExitSignal:
        if self._number is not None:
            self._before = signal.signal(self._number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._number is not None:
            signal.signal(self._number, self._before)

    def received(self) -> bool:
        """Whether some rank has got the signal (collective)."""
        if self._number is None:
            return False
        received = torch.tensor([self._first is not None], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return bool(received.item())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now  # printing is the loop's: a handler may interrupt a print
        elif now - self._first > SAME_SIGNAL_S:
            signal.signal(number, self._before)
            os.kill(os.getpid(), number)


def reader_start(args: argparse.Namespace) -> Callable[[int], None] | None:
    """What a process that reads data does first: leave the signal to the trainer, which ends such processes itself."""
    return functools.partial(_ignore, args.exit_signal) if args.exit_signal_handler else None


def _ignore(name: str, _: int) -> None:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
