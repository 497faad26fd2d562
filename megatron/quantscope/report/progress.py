"""Progress on stderr: bars with rate and remaining time on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


class Progress:
    """Shows the steps of a run, one after the other; quiet where stderr is no terminal."""

    def __init__(self, *, shown: bool | None = None) -> None:
        self._shown = sys.stderr.isatty() if shown is None else shown

    @contextmanager
    def step(self, title: str, total: int | None, *, bytes: bool = False) -> Iterator[Advance]:
        """One step; yields the function that says how much further it is.

        Args:
            title: What is done.
            total: How much there is to do; None: not known.
            bytes: Whether the amounts are bytes.
        """
        if not self._shown:
            yield lambda amount: None
            return
        from rich import progress
        from rich.console import Console

        amount = (
            [progress.DownloadColumn(), progress.TransferSpeedColumn()] if bytes else [progress.MofNCompleteColumn()]
        )
        columns = [
            progress.TextColumn("{task.description:18}"),
            progress.BarColumn(),
            *amount,
            progress.TimeRemainingColumn(),
        ]
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(title, total=total)
            yield lambda amount: bars.advance(task, amount)
