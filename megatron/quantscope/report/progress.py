"""Progress on stderr: bars with rate and remaining time on a terminal, nothing elsewhere.

What a terminal is, rich decides by the conventions of terminals: FORCE_COLOR and TTY_COMPATIBLE say that there is one
behind a pipe, NO_COLOR that bars have no colour, TERM=dumb that nothing can be drawn over. Where CI is set, a terminal
is a log that people read later, so there are no bars either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

Advance = Callable[[int], None]


class Progress:
    """Shows the steps of a run, one after the other.

    Args:
        shown: Whether bars are drawn; None: where stderr is a terminal that can, and not one of a CI machine.
    """

    def __init__(self, *, shown: bool | None = None) -> None:
        self._shown = shown

    @contextmanager
    def step(self, title: str, total: int | None, *, bytes: bool = False) -> Iterator[Advance]:
        """One step; yields the function that says how much further it is.

        Args:
            title: What is done.
            total: How much there is to do; None: not known.
            bytes: Whether the amounts are bytes.
        """
        from rich.console import Console
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        if not self._is_shown(console):
            yield lambda amount: None
            return
        with Bars(*_columns(bytes=bytes), console=console, transient=True) as bars:
            task = bars.add_task(title, total=total)
            yield lambda amount: bars.advance(task, amount)

    def _is_shown(self, console: Console) -> bool:
        if self._shown is not None:
            return self._shown
        return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


def _columns(*, bytes: bool) -> list[ProgressColumn]:
    from rich import progress

    bar = [progress.TextColumn("{task.description:18}"), progress.BarColumn()]
    if bytes:
        return [*bar, progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn()]
    return [*bar, progress.MofNCompleteColumn(), _rate_column(), progress.TimeRemainingColumn()]


def _rate_column() -> ProgressColumn:
    """How many a second; rich has such a column for bytes only."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "?/s", style="progress.data.speed")

    return RateColumn()
