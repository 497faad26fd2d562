"""One line that says how far a long run is: rewritten in place on a terminal, now and then a new one elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 30.0
UNITS = ((3600, "h"), (60, "min"), (1, "s"))


class ProgressLine:
    """Shows documents, tokens, rates, and the time left.

    Args:
        total: bytes of the input.
        done: bytes, documents and tokens that an earlier run has done; rates are of this run.
        stream: where to.
    """

    def __init__(self, total: int, done: tuple[int, int, int] = (0, 0, 0), stream: TextIO | None = None) -> None:
        self._total = max(total, 1)
        self._before = done
        self._stream = stream or sys.stderr
        self._in_place = self._stream.isatty()
        self._started = self._shown = time.monotonic()

    def show(self, consumed: int, documents: int, tokens: int) -> None:
        """Say where the run is: bytes of the input, documents and tokens, earlier runs' included."""
        now = time.monotonic()
        if now - self._shown < (TERMINAL_SECONDS if self._in_place else LOG_SECONDS):
            return
        self._shown = now
        line = self.line(consumed, documents, tokens, now - self._started)
        print(f"\r\x1b[K{line}" if self._in_place else line, end="" if self._in_place else "\n", file=self._stream)
        self._stream.flush()

    def line(self, consumed: int, documents: int, tokens: int, seconds: float) -> str:
        """The line, `seconds` after the start."""
        read, new_documents = consumed - self._before[0], documents - self._before[1]
        seconds = max(seconds, 1e-9)
        left = (self._total - consumed) / read * seconds if read > 0 else None
        return (
            f"{100 * consumed / self._total:.0f} %  {documents:,} documents  {tokens:,} tokens  "
            f"{new_documents / seconds:,.0f} documents/s  {read / seconds / 1e6:.2f} MB/s"
            + (f"  {duration(left)} left" if left is not None else "")
        )

    def end(self) -> None:
        """Clear the line of a terminal."""
        if self._in_place:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Seconds in the largest unit that gives a whole number: 90 s are 1 min."""
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), (1, "s"))
    return f"{seconds / size:.0f} {unit}"
