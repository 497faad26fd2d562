"""The loop over iterations, and the ways it ends.

Training ends after --train-iters or --train-samples, when the capture has what it was asked for, at --exit-interval,
after --exit-duration-in-mins, or on a signal (`exit_signal`). All ranks decide alike, from values they share.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.quantscope.capture import CaptureError, CaptureSession
from megatron.training.checkpoint.checkpoint_writer import CheckpointWriter
from megatron.training.checkpoint.checkpointing import TrainingState, save_checkpoint
from megatron.training.console import print_rank_0
from megatron.training.data.batches import MicroBatch, micro_batches
from megatron.training.data.datasets import Datasets
from megatron.training.evaluation import evaluate
from megatron.training.exit_signal import ExitSignal
from megatron.training.failure import TrainingError
from megatron.training.reporting.params_norm import params_norm, require_equal_replicas
from megatron.training.reporting.profile import profiling
from megatron.training.reporting.progress import ProgressLog, Report
from megatron.training.reporting.router_losses import router_losses
from megatron.training.steps import LOSS, ForwardStep, Step, train_step

MINUTE_S = 60.0


@dataclass(frozen=True)
class Run:
    """A built run.

    Attributes:
        args: The checked arguments.
        state: Model, optimizer, schedules and how far they have come.
        datasets: What is read.
        session: What keeps tensors; None: nothing does.
        log: Where the numbers of each iteration go.
        writer: What writes checkpoints.
        exit_signal: What asks training to end.
        start: When the process began to work, in seconds of the monotonic clock.
    """

    args: argparse.Namespace
    state: TrainingState
    datasets: Datasets
    session: CaptureSession | None
    log: ProgressLog
    writer: CheckpointWriter
    exit_signal: ExitSignal
    start: float


def train(run: Run) -> bool:
    """Iterate until the run ends, and save what --save asks for.

    Returns:
        True when all iterations are done, False when the run ends before.

    Raises:
        TrainingError: when loss or gradients are not finite, and that is checked, or a checkpoint can not be written.
    """
    args, progress = run.args, run.state.progress
    if _complete(run):
        print_rank_0(f"nothing to train: the checkpoint has all of its {progress.iteration} iterations")
        return True
    data = micro_batches(args, run.datasets.train, consumed=progress.consumed_train_samples)
    validation = micro_batches(args, run.datasets.valid, consumed=progress.consumed_valid_samples)
    forward = ForwardStep(run.session)
    reason = None
    with _garbage_collected_by_hand(args), profiling(args) as profiler:
        while reason is None:
            profiler.begin()
            step, report = iterate(run, data, forward)
            profiler.end()
            reason = _why_it_ends(run)
            run.log.add(report, last=reason is not None or not step.finite)
            _require_finite(step, report)
            if run.datasets.valid is not None and _due(progress.iteration, args.eval_interval):
                _validate(run, validation)
            run.writer.poll()
            if args.save and (reason is not None or _due(progress.iteration, args.save_interval)):
                save_checkpoint(args, run.state, run.writer)
            if _due(progress.iteration, args.check_weight_hash_across_dp_replicas_interval):
                require_equal_replicas(run.state.model, progress.iteration)
            if args.manual_gc and _due(progress.iteration, args.manual_gc_interval):
                gc.collect()
    run.writer.finish()
    print_rank_0(f"training ends after iteration {progress.iteration}: {reason}")
    return _complete(run)


def iterate(run: Run, data: Iterator[MicroBatch], forward: ForwardStep) -> tuple[Step, Report]:
    """One iteration: the step, the schedules, the counters and the capture around it.

    Returns:
        The step, and what there is to report of it.

    Raises:
        TrainingError: when collecting ended early, and that ends the run.
    """
    args, state, progress, session = run.args, run.state, run.state.progress, run.session
    update_num_microbatches(progress.consumed_train_samples, consistency_check=False)
    batch = get_current_global_batch_size()
    start = time.perf_counter()
    learning_rate = _learning_rate(state)
    if session is not None:
        session.begin_iteration(progress.iteration)
    step = train_step(args, state.model, state.optimizer, data, forward)
    if step.updated:
        state.scheduler.step(increment=batch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    progress.iteration += 1
    progress.consumed_train_samples += batch
    if session is not None:
        _end_capture(session, _scalars(step, learning_rate))
    report = Report(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_train_samples,
        seconds=seconds,
        learning_rate=learning_rate,
        global_batch_size=batch,
        loss=step.loss,
        loss_scale=float(state.optimizer.get_loss_scale()),
        grad_norm=step.grad_norm,
        zeros=step.zeros,
        skipped=step.finite and not step.updated,
        params_norm=params_norm(state.model) if args.log_params_norm else None,
        router_losses=router_losses(args, get_num_microbatches()),
    )
    return step, report


def _end_capture(session: CaptureSession, scalars: dict[str, float]) -> None:
    """The collected iteration is complete; an error that --tensor-on-error lets through ends the run."""
    try:
        session.end_iteration(scalars)
    except CaptureError as error:
        raise TrainingError(f"--tensor-on-error stop: {error}") from None


def _scalars(step: Step, learning_rate: float) -> dict[str, float]:
    """What goes into the commit record of a collected iteration."""
    values = {LOSS: step.loss, "grad norm": step.grad_norm, "learning rate": learning_rate}
    return {name: value for name, value in values.items() if value is not None}


def _learning_rate(state: TrainingState) -> float:
    """The learning rate of the coming step, of the parameters that have no other one of their own."""
    groups = state.optimizer.param_groups
    plain = [group for group in groups if not (group.get("is_decoupled_lr") or group.get("default_config") is False)]
    return float((plain or groups)[0]["lr"])


def _require_finite(step: Step, report: Report) -> None:
    if not step.finite:
        raise TrainingError(
            f"loss or gradients of iteration {report.iteration} are not finite (lm loss: {report.loss}); "
            "--no-check-for-nan-in-loss-and-grad trains on"
        )


def _why_it_ends(run: Run) -> str | None:
    """Why this iteration is the last one; None when it is not."""
    args, iteration = run.args, run.state.progress.iteration
    if _complete(run):
        return "all iterations are done"
    if run.session is not None and run.session.finished:
        return "all iterations that were to be collected are (--control-iter)"
    if _due(iteration, args.exit_interval):
        return f"--exit-interval {args.exit_interval}"
    if args.exit_duration_in_mins and _longest(time.monotonic() - run.start) > args.exit_duration_in_mins * MINUTE_S:
        return f"--exit-duration-in-mins {args.exit_duration_in_mins:g}"
    if run.exit_signal.received():
        return f"{run.exit_signal.name} (--exit-signal-handler)"
    return None


def _complete(run: Run) -> bool:
    args, progress = run.args, run.state.progress
    if args.train_samples:
        return progress.consumed_train_samples >= args.train_samples
    return progress.iteration >= args.train_iters


def _due(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0


def _longest(seconds: float) -> float:
    """The longest of the times that the ranks measured: they have to decide alike."""
    longest = torch.tensor([seconds], dtype=torch.float32, device=torch.cuda.current_device())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _validate(run: Run, data: Iterator[MicroBatch]) -> None:
    by_hand = run.args.manual_gc and run.args.manual_gc_eval
    if by_hand:
        gc.collect()
    loss = evaluate(run.args, run.state.model, data, run.session)
    run.state.progress.consumed_valid_samples += run.args.eval_iters * run.args.global_batch_size
    run.log.add_evaluation("validation", run.state.progress.iteration, loss)
    if by_hand:
        gc.collect()


@contextlib.contextmanager
def _garbage_collected_by_hand(args: argparse.Namespace) -> Iterator[None]:
    """With --manual-gc, no collection at a moment that differs between ranks."""
    if args.manual_gc:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
