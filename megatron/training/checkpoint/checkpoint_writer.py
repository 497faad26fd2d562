"""Writing the contents of checkpoints through megatron-core's dist_checkpointing, at once or while training goes on.

With `--async-save` a checkpoint is written by a process that is forked off the trainer: the fork holds the state as it
was (tensors on a GPU are copied to the host before), so the next iteration may change it. Between iterations the ranks
ask each other whether all have written; then the checkpoint gets its name and becomes the latest (`poll`). One
checkpoint at a time: where the next is due before the last one is written, training waits.

Trade-off of the fork: host memory for what the trainer changes meanwhile, in the worst case one more copy of the state.

What the writing processes found out returns through a file without a name (`_Results`). megatron-core starts a server
process for it, which costs a rank seconds and 190 MB, and outlives a trainer that is killed, for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.training.checkpoint import checkpoint_directory
from megatron.training.checkpoint.architecture import write_architecture
from megatron.training.console import print_rank_0
from megatron.training.failure import TrainingError

vars(np).setdefault("product", np.prod)  # megatron-core before 0.16 calls it by the name that numpy 2 dropped

# megatron-core 0.19 would take another package's implementation unless told; before, there was one, and no choice.
_OWN_IMPLEMENTATION = {"async_strategy": "mcore"}


class _Results:
    """A queue of one, from a forked process or this one: a file without a name that both have open."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the trainer runs)

    def put(self, item: Any) -> None:
        """Keep `item`, in place of what was there."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(ForkingPickler.dumps(item))  # as multiprocessing sends what is put into a queue
        self._file.flush()

    def get_nowait(self) -> Any:
        """Take out what was put last.

        Raises:
            queue.Empty: when nothing was.
        """
        self._file.seek(0)
        held = self._file.read()
        self._file.seek(0)
        self._file.truncate()
        if not held:
            raise queue.Empty
        return ForkingPickler.loads(held)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A checkpoint that is being written."""

    directory: Path
    name: str
    announcement: str | None
    start: float


class CheckpointWriter:
    """Writes checkpoints; every method is collective.

    Args:
        in_background: Return from `write` as soon as the state may change.
        fully_parallel: Share the writing of weights among the ranks that have the same.
        constant_structure: Work out the shares once.
        retain: As `checkpoint_directory.complete` takes it.
        on_complete: Told the name of each checkpoint that is complete.
    """

    def __init__(
        self,
        *,
        in_background: bool = False,
        fully_parallel: bool = True,
        constant_structure: bool = False,
        retain: int | None = None,
        on_complete: Callable[[str], None] | None = None,
    ) -> None:
        filesystem_async._results_queue = _Results()  # upstream asks for one of its own only where there is none
        self._in_background = in_background
        self._retain = retain
        self._on_complete = on_complete
        self._tag = _tag_of_all_ranks()
        self._queue = AsyncCallsQueue()
        self._pending: _Pending | None = None
        self._strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=constant_structure)
        if fully_parallel:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, group, constant_structure)

    @classmethod
    def of(cls, args: argparse.Namespace, *, on_complete: Callable[[str], None] | None = None) -> CheckpointWriter:
        """As the flags say."""
        return cls(
            in_background=args.async_save,
            fully_parallel=args.ckpt_fully_parallel_save,
            constant_structure=args.ckpt_assume_constant_structure,
            retain=args.save_retain_interval,
            on_complete=on_complete,
        )

    def write(
        self,
        directory: Path,
        name: str,
        contents: dict[str, Any],
        *,
        architecture: dict[str, Any],
        metadata: dict[str, Any],
        announcement: str | None = None,
    ) -> None:
        """Write the checkpoint called `name` and make it the latest, or begin to.

        Args:
            directory: Made if it is not there.
            name: A number of iterations, or "release".
            contents: As dist_checkpointing takes them.
            architecture: The model flags.
            metadata: How the contents are laid out: plain data, stored with them.
            announcement: What is printed when it is complete; None: nothing.

        Raises:
            TrainingError: when it can not be written, or the one before could not; the latest stays what it is.
        """
        self.finish()
        folder = str(checkpoint_directory.being_written(directory, name, self._tag))
        self._pending = _Pending(directory=directory, name=name, announcement=announcement, start=time.monotonic())
        background = {"async_sharded_save": True, **_supported(_OWN_IMPLEMENTATION)} if self._in_background else {}
        with self._failing_cleanly(self._pending):
            if dist.get_rank() == 0:
                checkpoint_directory.prepare(directory, name, self._tag)
                write_architecture(directory, architecture)
            dist.barrier()
            request = dist_checkpointing.save(contents, folder, self._strategy, content_metadata=metadata, **background)
            if request is not None:
                self._queue.schedule_async_request(request)
                print_rank_0(f"writing checkpoint {name} to {directory} while training goes on")
                return
        self._complete()

    def poll(self) -> None:
        """Name the checkpoint that was being written, if all ranks have written it.

        Raises:
            TrainingError: when it could not be written.
        """
        if self._pending is not None:
            self._finalize(self._pending, blocking=False)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any.

        Raises:
            TrainingError: when it could not be written.
        """
        if self._pending is not None:
            self._finalize(self._pending, blocking=True)

    def _finalize(self, pending: _Pending, *, blocking: bool) -> None:
        with self._failing_cleanly(pending):
            done = self._queue.maybe_finalize_async_calls(blocking=blocking)
        if done:
            self._complete()

    def _complete(self) -> None:
        pending = self._pending
        assert pending is not None
        with self._failing_cleanly(pending):
            dist.barrier()
            if dist.get_rank() == 0:
                checkpoint_directory.complete(pending.directory, pending.name, self._tag, retain=self._retain)
            dist.barrier()
        self._pending = None
        if self._on_complete is not None:
            self._on_complete(pending.name)
        if pending.announcement:
            print_rank_0(f"{pending.announcement} ({time.monotonic() - pending.start:.1f} s)")

    @contextlib.contextmanager
    def _failing_cleanly(self, pending: _Pending) -> Iterator[None]:
        """Of a checkpoint that can not be written nothing stays, and one line says why."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:  # upstream's processes pass on what they meet
            self._pending = None
            if dist.get_rank() == 0:
                checkpoint_directory.discard(pending.directory, pending.name, self._tag)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else last_line(error)
            raise TrainingError(f"the checkpoint can not be written to {pending.directory}: {reason}") from error


def last_line(error: BaseException) -> str:
    """Of an error that carries a traceback in its text, the line that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _tag_of_all_ranks() -> str:
    """What tells this run's temporary names from another's, even on another machine."""
    tag = [f"{time.time_ns():x}-{os.getpid():x}"]
    dist.broadcast_object_list(tag, src=0)
    return tag[0]


def _supported(options: dict[str, Any]) -> dict[str, Any]:
    """The options that this megatron-core knows."""
    known = inspect.signature(dist_checkpointing.save).parameters
    return {name: value for name, value in options.items() if name in known}
