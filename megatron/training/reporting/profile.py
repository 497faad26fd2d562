"""Profiles of some iterations, for torch's trace viewers or for Nsight Systems, and the history of GPU memory.

`--profile` covers the iterations after `--profile-step-start` up to `--profile-step-end`, counted from this start of
the trainer, on the ranks of `--profile-ranks`. With a GPU and without `--use-pytorch-profiler` only marks are set,
which `nsys profile --capture-range=cudaProfilerApi` waits for. torch's profiler writes `rank<r>.<time>.pt.trace.json`,
which Perfetto, chrome://tracing and TensorBoard's profile plugin open. Profiling changes no number of the training.

A run that ends within the range ends its profile too, and what was recorded until then is written. One that ends before
the range says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.training.console import print_rank_0
from megatron.training.failure import TrainingError

MEMORY_EVENTS = 100_000  # allocations and their ends that are remembered, the latest ones


class Profiler(Protocol):
    """Told when an iteration begins and when it has ended."""

    def begin(self) -> None:
        """An iteration begins."""

    def end(self) -> None:
        """It has ended."""


class _Recorder:
    """Enters `recording` before iteration --profile-step-start of this start, from 0, and leaves it at the end."""

    def __init__(self, args: argparse.Namespace, recording: contextlib.AbstractContextManager[object]) -> None:
        self._first, self._behind = args.profile_step_start, args.profile_step_end
        self._recording = recording
        self._iteration = 0
        self._entered = self._open = False

    def begin(self) -> None:
        if self._iteration == self._first:
            self._recording.__enter__()
            self._entered = self._open = True

    def end(self) -> None:
        self._iteration += 1
        if self._iteration == self._behind:
            self.close()

    def close(self) -> None:
        """End the recording, if it runs."""
        if self._open:
            self._open = False
            self._recording.__exit__(None, None, None)

    def report_missed(self) -> None:
        """Say so, if training ended before the range began."""
        if not self._entered:
            print(
                f"--profile: training ended after {self._iteration} iterations, before iteration {self._first + 1} of "
                f"this start: nothing was profiled on rank {dist.get_rank()}",
                flush=True,
            )


class _Idle:
    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


@contextlib.contextmanager
def profiling(args: argparse.Namespace) -> Iterator[Profiler]:
    """A profiler as `args` ask for, for the length of the block; one that does nothing on ranks not asked about.

    Raises:
        TrainingError: when the history of memory can not be written.
    """
    with _memory_history(args):
        if not args.profile:
            yield _Idle()
            return
        by_torch = args.use_pytorch_profiler or not torch.cuda.is_available()
        if by_torch and not args.use_pytorch_profiler:
            print_rank_0("--profile: Nsight Systems needs CUDA; without a GPU this is torch's profiler")
        if dist.get_rank() not in args.profile_ranks:
            yield _Idle()
            return
        recorder = _Recorder(args, _torch_recording(args) if by_torch else _nsight_range())
        try:
            yield recorder
        finally:
            recorder.close()
        recorder.report_missed()


def trace_directory(args: argparse.Namespace) -> Path:
    """Where traces go: TensorBoard's directory, else the checkpoints'."""
    return Path(args.tensorboard_dir or args.save)


@contextlib.contextmanager
def _torch_recording(args: argparse.Namespace) -> Iterator[None]:
    """Record by torch's profiler, and write the trace at the end."""
    from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    directory, rank = trace_directory(args), dist.get_rank()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(
        activities=activities,
        record_shapes=args.pytorch_profiler_collect_shapes,
        with_stack=args.pytorch_profiler_collect_callstack,
        on_trace_ready=tensorboard_trace_handler(str(directory), worker_name=f"rank{rank}"),
    ):
        yield
    print(f"profile of rank {rank} written to {directory}", flush=True)


@contextlib.contextmanager
def _nsight_range() -> Iterator[None]:
    """Set the marks between which nsys records, and name torch's operations in its timeline."""
    torch.cuda.profiler.start()
    try:
        with torch.autograd.profiler.emit_nvtx(record_shapes=True):
            yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@contextlib.contextmanager
def _memory_history(args: argparse.Namespace) -> Iterator[None]:
    """With --record-memory-history, record allocations in the block and write them at its end, however it ends.

    Raises:
        TrainingError: when the file can not be written.
    """
    if not args.record_memory_history or dist.get_rank() not in (0, dist.get_world_size() - 1):
        yield
        return
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        yield
    finally:
        path = _snapshot_path(args)
        try:
            memory._dump_snapshot(str(path))
        except OSError as error:
            raise TrainingError(f"--memory-snapshot-path: {path} can not be written: {error.strerror}") from None
        print(f"memory history of rank {dist.get_rank()} written to {path}", flush=True)


def _snapshot_path(args: argparse.Namespace) -> Path:
    """The path asked for; of several ranks the last has its number in the name."""
    path = Path(args.memory_snapshot_path)
    return path if dist.get_rank() == 0 else path.with_name(f"{path.stem}_rank{os.environ.get('RANK')}{path.suffix}")
