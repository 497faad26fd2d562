"""`--tensor-dry-run`: rows, files and bytes of a capture, exact to the byte, before anything is written.

Forward and backward of the first iteration that would be collected run through the real schedule, with a session that
takes every tensor as always, makes its file in memory, and counts it. So filters, modes, formats, parallel layouts and
rows that share a file need no second arithmetic that could disagree with the first. The optimizer does not step, and no
file or folder is made.

The figures are those of the first iteration. Later ones differ by the digits of their coordinates, which stand in names
and metadata. With a `--tensor-schedule` that starts later, the first iteration's own weights are not known yet: that
shows only where content decides what is stored once (`--tensor-save-format segment`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron.core.attachment import gradient_scale
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.quantscope.capture import CaptureConfig, CaptureError, CaptureSession, Schedule
from megatron.quantscope.capture.config import BYTES_PER_GB
from megatron.training.capture import print_table
from megatron.training.console import print_rank_0
from megatron.training.data.batches import micro_batches
from megatron.training.failure import SharedFailure, UsageError
from megatron.training.loop import Run
from megatron.training.steps import ForwardStep, run_micro_batches

MANIFEST_ROW_BYTES = 2_000  # of a manifest, a row: rounded up from what rows were seen to take
NUMBERS = (1, 2, 3)  # columns of the table
UNITS = ("B", "kB", "MB", "GB", "TB")
LARGEST_SHOWN = 999.5  # of a unit: more would be rounded to four digits


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is written, by one rank or by several."""

    rows: int
    files: int
    bytes: int

    def __add__(self, other: Measured) -> Measured:
        return Measured(rows=self.rows + other.rows, files=self.files + other.files, bytes=self.bytes + other.bytes)

    def __mul__(self, times: int) -> Measured:
        return Measured(rows=self.rows * times, files=self.files * times, bytes=self.bytes * times)


def dry_run(run: Run) -> None:
    """Print what a collected iteration and the whole capture would take (collective).

    Args:
        run: A built run, with a session that writes nothing.

    Raises:
        UsageError: when training ends before the first iteration that would be collected.
        SharedFailure: when a tensor could not be kept.
    """
    args, session, done = run.args, run.session, run.state.progress.iteration
    assert session is not None  # settled so
    schedule, left = Schedule.parse(args.tensor_schedule), max(0, args.train_iters - done)
    if schedule.start >= left:
        raise UsageError(
            f"nothing would be captured: --tensor-schedule starts at step {schedule.start}, training has {left} left"
        )
    _rehearse(run, session, schedule.start)
    ranks = _of_all_ranks(session)
    of_them = get_num_microbatches()
    print_rank_0(
        f"dry run of iteration {done + schedule.start}: {min(session.config.collect_micro_batches, of_them)} of "
        f"{of_them} micro-batches, mode {session.config.mode}, format {session.config.save_format}"
    )
    iterations = planned_iterations(schedule, args.control_iter, left)
    print_table(table(ranks, iterations), numbers=NUMBERS)
    for line in limits(ranks, iterations, session.config, budget=int(args.tensor_budget_gb * BYTES_PER_GB)):
        print_rank_0(line)
    print_rank_0("nothing was written; run without --tensor-dry-run to capture")


def _rehearse(run: Run, session: CaptureSession, start: int) -> None:
    """Show `session` the step that is `start` steps ahead, as far as it can be known now."""
    args, model, progress = run.args, run.state.model, run.state.progress
    consumed = progress.consumed_train_samples
    update_num_microbatches(consumed, consistency_check=False)
    for _ in range(start):
        consumed += get_current_global_batch_size()
        update_num_microbatches(consumed, consistency_check=False)
    session.begin_iteration(progress.iteration + start)
    for chunk in model:
        chunk.zero_grad_buffer()
    data = micro_batches(args, run.datasets.train, consumed=consumed)
    forward = ForwardStep(session)
    forward.grad_scale = gradient_scale(args, run.state.optimizer)
    run_micro_batches(args, model, data, forward, forward_only=False)


def _of_all_ranks(session: CaptureSession) -> list[Measured]:
    """What each rank's session has counted (collective).

    Raises:
        SharedFailure: when collecting ended early on one of them.
    """
    with contextlib.suppress(CaptureError):  # of --tensor-on-error stop: `failed` says it
        session.end_iteration({})
    session.close()
    summary = session.summary()
    ours = session.failed, Measured(rows=summary.rows, files=summary.files, bytes=summary.bytes)
    everyone = [ours] * dist.get_world_size()
    dist.all_gather_object(everyone, ours)
    for rank, (failed, _) in enumerate(everyone):
        if failed:
            raise SharedFailure(f"collecting would end early on rank {rank}: {failed}")
    return [measured for _, measured in everyone]


def planned_iterations(schedule: Schedule, control_iter: int, left: int) -> int:
    """How many iterations are collected until training ends, or has `control_iter` of them, 0 being no limit.

    Args:
        schedule: Which steps are collected.
        control_iter: As --control-iter.
        left: Steps that training has left.
    """
    end = left if schedule.until is None else min(left, schedule.until)
    due = len(range(schedule.start, end, schedule.every))
    return min(due, control_iter) if control_iter else due


def table(ranks: Sequence[Measured], iterations: int) -> list[tuple[str, ...]]:
    """One iteration, of several ranks the one that writes most, and all iterations.

    Args:
        ranks: What each would write in one iteration.
        iterations: How many are collected.
    """
    one = _sum(ranks)
    lines = [("", "rows", "files", "bytes", ""), _line("an iteration", one, size(one.bytes))]
    if len(ranks) > 1:
        most = _largest(ranks)
        share = most.bytes / one.bytes if one.bytes else 0.0
        lines.append(_line(f"rank {ranks.index(most)} has most", most, f"{share:.1%} of it"))
    if iterations > 1:
        total = one * iterations
        note = f"{size(total.bytes)}; later ones differ by the digits of their coordinates"
        lines.append(_line(f"{iterations:,} iterations, about", total, note))
    return lines


def limits(ranks: Sequence[Measured], iterations: int, config: CaptureConfig, *, budget: int) -> list[str]:
    """Whether `budget` bytes and the disk have room for all iterations, a line each.

    Every rank that keeps anything has an equal share of the budget, so the one that writes most spends it first.
    """
    one, most = _sum(ranks), _largest(ranks)
    share = budget // max(1, config.filter.kept_ranks(len(ranks)))
    directory = config.directory.absolute()
    place = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    with_manifests = one.bytes + one.rows * MANIFEST_ROW_BYTES
    return [
        f"--tensor-budget-gb: {size(budget)}, {_fitting(share, most.bytes, iterations)}",
        f"free in {place}: {size(free)}, {_fitting(free, with_manifests, iterations)} (with about "
        f"{size(one.rows * MANIFEST_ROW_BYTES)} of manifests an iteration)",
    ]


def _fitting(room: int, each: int, iterations: int) -> str:
    """How many iterations of `each` bytes `room` is enough for."""
    if not each:
        return "enough"
    fit = f"{room // each:,} iterations fit"
    return fit if room // each >= iterations else f"NOT ENOUGH for {iterations:,}: {fit}"


def _sum(ranks: Sequence[Measured]) -> Measured:
    return sum(ranks, Measured(rows=0, files=0, bytes=0))


def _largest(ranks: Sequence[Measured]) -> Measured:
    return max(ranks, key=lambda each: each.bytes)


def _line(label: str, measured: Measured, note: str) -> tuple[str, ...]:
    return (label, f"{measured.rows:,}", f"{measured.files:,}", f"{measured.bytes:,}", note)


def size(count: float) -> str:
    """A number of bytes in decimal units: 731 MB."""
    for unit in UNITS[:-1]:
        if count < LARGEST_SHOWN:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {UNITS[-1]}"
