"""How many bytes a rank may write, and what is left of them."""

from __future__ import annotations

import threading

from megatron.quantscope.capture.config import BYTES_PER_GB
from megatron.quantscope.capture.errors import CaptureError


class Budget:
    """Counts bytes down. Safe to use from several threads.

    Args:
        limit_bytes: What may be spent.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._spent = 0
        self._lock = threading.Lock()

    def spend(self, size: int) -> None:
        """Take `size` bytes; a negative number gives back.

        Raises:
            CaptureError: when they are more than what is left; then nothing is taken.
        """
        with self._lock:
            if size > 0 and self._spent + size > self._limit:
                raise CaptureError(
                    f"the budget of {self._limit / BYTES_PER_GB:g} GB a rank is spent; raise --tensor-budget-gb"
                )
            self._spent += size
