"""SIGTERM: what was handed over reaches the disk before the process goes.

A scheduler or a launcher ends processes by SIGTERM and, some seconds later, by SIGKILL. Python runs a signal's handler
between two instructions of the main thread, which may never come: the main thread often waits in a collective for a
rank that is gone. So a thread waits for the signal's number on a pipe, which the interpreter fills from within the real
handler, and flushes. The main thread goes on meanwhile, since it may hold a lock that the flush needs. Then the signal
is sent once more, for the main thread to let it have its default effect; where that does not come, the thread ends the
process with the exit code that shells give such a death.

SIGINT needs nothing here: KeyboardInterrupt unwinds the main thread, and a launcher follows up by SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

_SIGNAL = signal.SIGTERM
_FLUSH_S = 20.0  # launchers send SIGKILL after 30
_MAIN_THREAD_S = 1.0  # what the main thread gets after the flush to end the process by the signal
_EXIT_CODE_OF_SIGNALS = 128  # plus the signal's number
_STOP = b"\0"  # on the pipe: no signal has the number 0


class TerminationWatch:
    """Calls `flush` once when SIGTERM comes, from a thread of its own, and then lets the process end.

    Only the main thread can install it, and only where nobody else handles SIGTERM; otherwise it does nothing. Whoever
    handles SIGTERM later takes it over. A forked child does not inherit it.

    Args:
        flush: Must be safe to call from any thread.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._flushed = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._process = os.getpid()

    def install(self) -> None:
        """Begin to watch."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        taken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if taken != -1:  # an event loop's
            signal.set_wakeup_fd(taken)
            os.close(reading)
            os.close(writing)
            return
        self._pipe = reading, writing
        signal.signal(_SIGNAL, self._in_main_thread)
        threading.Thread(target=self._watch, args=(reading,), name="capture-termination", daemon=True).start()
        os.register_at_fork(after_in_child=self._forget)

    def remove(self) -> None:
        """Stop watching; idempotent."""
        if self._pipe is None or os.getpid() != self._process:
            return
        if threading.current_thread() is not threading.main_thread():
            return  # the flush itself: the process ends anyway
        _, writing = self._pipe
        self._pipe = None
        self._flush = _nothing  # the hook of forks keeps this object, and would keep the session
        self._let_go(writing)
        os.write(writing, _STOP)
        os.close(writing)

    def _watch(self, reading: int) -> None:
        while (number := os.read(reading, 1)) and number != _STOP:
            if number[0] == _SIGNAL and signal.getsignal(_SIGNAL) == self._in_main_thread:
                threading.Thread(target=self._flush_once, name="capture-flush", daemon=True).start()
                if not self._flushed.wait(_FLUSH_S):  # a copy from a device that hangs never arrives
                    log.error("what was collected last did not reach the disk within %g s", _FLUSH_S)
                    self._flushed.set()
                os.kill(os.getpid(), _SIGNAL)
                time.sleep(_MAIN_THREAD_S)
                os._exit(_EXIT_CODE_OF_SIGNALS + _SIGNAL)
        os.close(reading)

    def _flush_once(self) -> None:
        try:
            self._flush()
        except Exception:
            log.exception("what was collected could not be flushed")
        finally:
            self._flushed.set()

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self._flushed.is_set():
            signal.signal(_SIGNAL, signal.SIG_DFL)
            os.kill(os.getpid(), _SIGNAL)

    def _forget(self) -> None:
        """In a forked child: its SIGTERM is its own."""
        if self._pipe is not None:
            _, writing = self._pipe
            self._pipe = None
            self._let_go(writing)

    def _let_go(self, writing: int) -> None:
        """Take back what is still ours of the process's handling of signals."""
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, writing):
            signal.set_wakeup_fd(current)
        if signal.getsignal(_SIGNAL) == self._in_main_thread:
            signal.signal(_SIGNAL, signal.SIG_DFL)


def _nothing() -> None:
    return None
