"""What the driver shows: live on a terminal, plain lines anywhere else.

On a terminal one line at the bottom follows the run (files, bytes, rate), with what the trainer says above it. In a
file or a pipe the same facts come as whole lines, at most one every few seconds, so that a log stays short.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

PLAIN_INTERVAL_SECONDS = 10.0
PLAIN_WIDTH = 120
UNITS = ("B", "kB", "MB", "GB", "TB")


class Display:
    """Prints to stdout; complaints go to stderr."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, width=PLAIN_WIDTH)
        self._status: Status | None = None
        self._last_plain = 0.0

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(Text(text), soft_wrap=True)

    def complain(self, text: str) -> None:
        """Print one line on stderr."""
        if self._status is not None:
            self._status.stop()
        print(text, file=sys.stderr, flush=True)
        if self._status is not None:
            self._status.start()

    @contextmanager
    def following(self, what: str) -> Iterator[None]:
        """Show the state that `follow` is told, until the block ends."""
        if not self._console.is_terminal:
            self._last_plain = time.monotonic()
            yield
            return
        with self._console.status(Text(what)) as self._status:
            yield
        self._status = None

    def follow(self, state: str) -> None:
        """Show the present state in place of the former one."""
        if self._status is not None:
            self._status.update(Text(state))
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_SECONDS:
            self._last_plain = time.monotonic()
            self.say(state)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; its first column is text, the others are numbers."""
        table = Table(
            title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
        )
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)


def size(count: float) -> str:
    """A number of bytes in decimal units: 731 MB."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != UNITS[0] else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} {UNITS[-1]}"
