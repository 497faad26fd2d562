"""Who else is told what a capture sees: of each row its metadata and statistics, once they are known.

A listener never delays the training. What it is told comes from the writers' threads; the training thread asks it for
one thing only, what it wants to find out on a device of a tensor there (`observe`). One that fails is told nothing
more, with one message, and the capture goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from megatron.quantscope.capture.metadata import TensorMetadata
from megatron.quantscope.capture.site import Shown

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class RowListener(Protocol):
    """Told of rows, in no particular order within an iteration, and of iterations in theirs."""

    def observe(self, tensor: torch.Tensor, shown: Shown) -> object:
        """Look at a CUDA tensor, on the training thread: only start work on the device.

        Returns:
            What `row` is to be given of it.
        """

    def row(
        self,
        metadata: TensorMetadata,
        statistics: Mapping[str, Any] | None,
        tensor: torch.Tensor | None,
        observed: object,
    ) -> None:
        """A row is known, on a writer's thread.

        Args:
            metadata: The row's.
            statistics: As `TensorStatistics.to_json`; None: the dtype has no real values.
            tensor: On the CPU, for the length of the call; None: it did not come to the host.
            observed: What `observe` returned; None: it was not asked.
        """

    def iteration(self, iteration: int) -> None:
        """All rows of an iteration have been told, and are on disk, on a writer's thread."""


class Listening:
    """A listener that may fail, as the capture calls it; safe to use from several threads."""

    def __init__(self, listener: RowListener) -> None:
        self._listener: RowListener | None = listener
        self._failing = threading.Lock()

    def observe(self, tensor: torch.Tensor, shown: Shown) -> object:
        """As of `RowListener`."""
        return self._tell("observe", tensor, shown)

    def row(
        self,
        metadata: TensorMetadata,
        statistics: Mapping[str, Any] | None,
        tensor: torch.Tensor | None,
        observed: object,
    ) -> None:
        """As of `RowListener`."""
        self._tell("row", metadata, statistics, tensor, observed)

    def iteration(self, iteration: int) -> None:
        """As of `RowListener`."""
        self._tell("iteration", iteration)

    def _tell(self, what: str, *details: object) -> object:
        listener = self._listener
        if listener is None:
            return None
        try:
            return getattr(listener, what)(*details)
        except Exception as error:  # of whatever kind: the capture and the training go on
            with self._failing:
                if self._listener is not None:
                    self._listener = None
                    log.error("%s is told of no more tensors: %s: %s", listener, type(error).__name__, error)
                    log.debug("where it went wrong", exc_info=error)
            return None
