"""Where the training stands now, for saves that do not say so themselves.

Each coordinate is what was set by hand, else what its environment variable says, else 0; the rank asks
torch.distributed before the environment. Instrumented modules do not read this: they bind their coordinates when the
forward runs, since under 1F1B a backward meets a global that has moved on.
"""

from __future__ import annotations

import os
import sys
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.capture.errors import CaptureUsageError

if TYPE_CHECKING:
    from megatron.quantscope.capture.session import CaptureSession

RANK_VARIABLE = "LOCAL_RANK"
SAMPLE_VARIABLE = "CURRENT_SAMPLE_IDX"
ITERATION_VARIABLE = "TENSOR_SAVER_ITERATION"


class TensorCollectionState:
    """The running coordinates. Assigning sets by hand, assigning None takes that back, reading resolves.

    Attributes:
        batch_idx: Micro-batch of the iteration, from 0.
        sequence_idx: Sequence of the micro-batch, from 0.
        directory: Capture root of the running session; None: no session runs.
        run_id: Run of the running session; None: no session runs.
        session: The running session itself.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._sample_idx: int | None = None
        self._iteration: int | None = None
        self.batch_idx: int = 0
        self.sequence_idx: int = 0
        self.directory: Path | None = None
        self.run_id: str | None = None
        self.session: CaptureSession | None = None

    @property
    def current_rank(self) -> int:
        """Set by hand, else torch.distributed's, else LOCAL_RANK, else 0."""
        if self._rank is not None:
            return self._rank
        distributed = _distributed_rank()
        return _from_environment(RANK_VARIABLE) if distributed is None else distributed

    @current_rank.setter
    def current_rank(self, rank: int | None) -> None:
        self._rank = _checked("rank", rank)

    @property
    def current_sample_idx(self) -> int:
        """Set by hand, else CURRENT_SAMPLE_IDX, else 0."""
        return _from_environment(SAMPLE_VARIABLE) if self._sample_idx is None else self._sample_idx

    @current_sample_idx.setter
    def current_sample_idx(self, sample_idx: int | None) -> None:
        self._sample_idx = _checked("sample_idx", sample_idx)

    @property
    def current_iteration(self) -> int:
        """Set by hand, else TENSOR_SAVER_ITERATION, else 0."""
        return _from_environment(ITERATION_VARIABLE) if self._iteration is None else self._iteration

    @current_iteration.setter
    def current_iteration(self, iteration: int | None) -> None:
        self._iteration = _checked("iteration", iteration)


STATE = TensorCollectionState()  # of this process


def _distributed_rank() -> int | None:
    distributed = sys.modules.get("torch.distributed")  # not imported: not initialised either
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank: int = distributed.get_rank()
    return rank


def _from_environment(variable: str) -> int:
    text = os.environ.get(variable, "").strip() or "0"
    if not text.isdecimal():
        raise CaptureUsageError(f"{variable}={text!r} is not allowed: give a whole number >= 0")
    return int(text)


def _checked(name: str, value: int | None) -> int | None:
    if value is None:
        return None
    if not isinstance(value, Integral) or value < 0:
        raise CaptureUsageError(f"{name} {value!r} is not allowed: give a whole number >= 0")
    return int(value)
