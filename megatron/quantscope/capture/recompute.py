"""Forwards that are run twice: once to go on, once more when the backward needs what the first did not keep.

Activation recomputation calls one function twice. The tensors of both calls are the same, so the forward is kept at the
first; the backward that follows the second belongs to the micro-batch of the first, which is another one than the
running one as soon as pipeline stages overlap forwards and backwards. `remembering` wraps the function: the first call
notes the moment, the second restores it, with forward tensors left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.state import STATE

if TYPE_CHECKING:
    from megatron.quantscope.capture.session import CaptureSession
    from megatron.quantscope.capture.site import Moment


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which is called once, or twice when its backward runs it again, with the first call's moment.

    Without a running session it is `function` itself.
    """
    session = STATE.session
    return function if session is None else _Remembering(function, session)


class _Remembering:
    def __init__(self, function: Callable[..., Any], session: CaptureSession) -> None:
        self._function = function
        self._session = session
        self._first = True
        self._moment: Moment | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._first:
            moment = self._session.moment
            self._moment = None if moment is None else replace(moment, recomputed=True)
        elif self._moment is not None:
            self._moment = replace(self._moment, replaying=True)
        self._first = False
        with _at(self._session, self._moment):
            return self._function(*args, **options)


@contextmanager
def _at(session: CaptureSession, moment: Moment | None) -> Iterator[None]:
    """What is shown in this block belongs to `moment`."""
    before = session.moment
    session.moment = moment
    try:
        yield
    finally:
        session.moment = before
