"""A session whose calls go through an observer: how the benchmark sees what capture does to the training thread.

The model is given a `WatchedSession` in place of the session; nothing of capture is replaced. Observers are told of

    tap(inner, where, what, tensor)    a module shows a tensor: `where` are the site's arguments, `what` the operation,
                                       phase and name, and `inner(*what, tensor)` takes it
    call(function, *arguments)         every other call of the training thread into capture
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

What = tuple[str, str, str]
Tap = Callable[..., None]


class Observer(Protocol):
    """What a watched session tells."""

    def tap(self, inner: Tap, where: dict[str, Any], what: What, tensor: torch.Tensor) -> None:
        """Pass a tensor on."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call."""


class WatchedSession:
    """Everything that `session` is, with the training thread's calls told to `observer`."""

    def __init__(self, session: Any, observer: Observer) -> None:
        self._session = session
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def site(self, **where: Any) -> WatchedSite | None:
        """The session's site, watched; None where the session has none."""
        site = self._session.site(**where)
        return None if site is None else WatchedSite(site, where, self._observer)

    def begin_iteration(self, iteration: int) -> None:
        """As the session's."""
        self._observer.call(self._session.begin_iteration, iteration)

    def begin_micro_batch(self, micro_batch: int, sample_indices: Iterable[int]) -> None:
        """As the session's."""
        self._observer.call(self._session.begin_micro_batch, micro_batch, sample_indices)

    def end_iteration(self, scalars: dict[str, float]) -> None:
        """As the session's."""
        self._observer.call(self._session.end_iteration, scalars)


@dataclass(frozen=True)
class WatchedSite:
    """A session's site whose taps tell `observer`."""

    site: Any
    where: dict[str, Any]
    observer: Observer

    def tap(self) -> Tap | None:
        """The site's tap, watched; None where nothing is kept now."""
        inner = self.observer.call(self.site.tap)
        return None if inner is None else partial(self._tap, inner)

    def _tap(self, inner: Tap, operation: str, phase: str, name: str, tensor: torch.Tensor) -> None:
        self.observer.tap(inner, self.where, (operation, phase, name), tensor)


@dataclass
class Seconds:
    """Time of the training thread: of the clock, and of its own CPU."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Add what passes inside the block."""
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += time.thread_time() - cpu


class Stopwatch:
    """How long capture blocks the training thread, beside a memcpy of the same tensors.

    The copies go, one behind the other, into a buffer that has been written before. Whichever of the two reads a tensor
    first finds it in a colder cache, so they take turns from row to row and, for one row, from step to step.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer = torch.zeros(buffer_bytes, dtype=torch.uint8)
        self._copy_first = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the step before."""
        self.blocked, self.copied = Seconds(), Seconds()
        self.rows = self.bytes = 0
        self._copy_first = not self._copy_first

    def tap(self, inner: Tap, where: dict[str, Any], what: What, tensor: torch.Tensor) -> None:
        """Time both."""
        works = [self._copy, lambda tensor: self.call(inner, *what, tensor)]
        for work in works if self._copy_first == bool(self.rows % 2) else reversed(works):
            work(tensor)
        self.rows += 1
        self.bytes += tensor.nbytes

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Time it."""
        with self.blocked.counting():
            return function(*arguments)

    def _copy(self, tensor: torch.Tensor) -> None:
        source = tensor.detach()
        target = self._buffer[self.bytes : self.bytes + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        with self.copied.counting():
            target.copy_(source)


@dataclass
class Recorder:
    """Remembers one step's rows, so that they can be shown again without the model.

    The tensors themselves are held and no copies, so that rows that share memory still do.
    """

    rows: list[tuple[dict[str, Any], What, torch.Tensor]] = field(default_factory=list)

    def tap(self, inner: Tap, where: dict[str, Any], what: What, tensor: torch.Tensor) -> None:
        """Remember it, and keep nothing."""
        self.rows.append((where, what, tensor.detach()))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make the call."""
        return function(*arguments)

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return sum(tensor.nbytes for _, _, tensor in self.rows)

    def replay(self, session: Any, iteration: int) -> None:
        """Show all rows to `session` as those of one iteration."""
        taps: dict[str, Tap] = {}
        session.begin_iteration(iteration)
        session.begin_micro_batch(0, [iteration])
        for where, what, tensor in self.rows:
            module = where["module"]
            if module not in taps:
                taps[module] = session.site(**where).tap()
            taps[module](*what, tensor)
        session.end_iteration({})

    def change(self) -> None:
        """Give every row another content, so that none of it was ever seen; what shares memory changes together."""
        storages = {tensor.untyped_storage().data_ptr(): tensor for _, _, tensor in self.rows}
        for tensor in storages.values():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            whole.mul_(1 + torch.finfo(whole.dtype).eps)
