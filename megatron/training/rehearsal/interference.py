"""`--tensor-check-interference`: the proof, on the user's own model, that capture changes nothing.

The same steps are trained three times from one state (`state_snapshot`): twice as without `--save-tensors`, then once
with capture. The two plain passes are the control. If they differ from each other already, the model does not repeat
itself, and a difference of the third would say nothing. Otherwise the third must agree with them in every bit: loss,
gradients as the optimizer gets them, their norm, and the parameters after the step (`step_trace`).

Steps: as many as `--control-iter` collects, at least two, since what capture does to a weight shows in the step after.
They are collected from the first on, whatever `--tensor-schedule` says. The captured pass leaves a normal capture;
no checkpoint is written and the training is not continued.

Each rank compares its own tensors; the verdict is that of all ranks together.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megatron.quantscope.capture import CaptureSession
from megatron.training.capture import attach, close_capture, print_table, settle
from megatron.training.console import print_rank_0
from megatron.training.data.batches import micro_batches
from megatron.training.failure import SharedFailure, UsageError
from megatron.training.loop import Run, iterate
from megatron.training.rehearsal.state_snapshot import StateSnapshot
from megatron.training.rehearsal.step_trace import (
    GRADIENT,
    PARAMETER,
    Difference,
    Prints,
    StepTrace,
    differing,
    first_difference,
    gradient_prints,
    trace,
)
from megatron.training.steps import ForwardStep

LEAST_STEPS = 2
CAN_NOT_TELL = "can not tell whether capture changes the training"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two passes over the same steps, over all ranks.

    Attributes:
        first: Where they part; None: nowhere.
        differing: For each step, how many of each kind differ.
        gradients: Gradient buffers, of each step.
        parameters: Parameters, of each step.
    """

    first: Difference | None
    differing: list[Counter[str]]
    gradients: int
    parameters: int


def check_interference(run: Run) -> None:
    """Train the same steps without and with capture, print how they compare, and give the verdict (collective).

    Args:
        run: A built run without a session.

    Raises:
        SharedFailure: when capture changes the training, or that can not be told.
        UsageError: when training has too few iterations left.
    """
    steps = _steps(run)
    print_rank_0(f"checking interference: {steps} steps, twice without capture and once with it")
    start = StateSnapshot(run.state)
    plain = _train(run, steps)
    start.restore()
    control = compare(plain, _train(run, steps))
    if control.first is not None:
        raise SharedFailure(
            f"{CAN_NOT_TELL}: two passes without capture differ already, first in {control.first}; the model does not "
            "repeat itself (--deterministic-mode may help)"
        )
    start.restore()
    captured, session = _train_with_capture(run, steps)
    comparison = compare(plain, captured)
    _print_comparison(plain, captured, comparison)
    if comparison.first is not None:
        raise SharedFailure(f"capture changed the training, first in {comparison.first}")
    _require_complete(session)
    print_rank_0(
        f"capture changed nothing: {steps} steps, {comparison.gradients} gradient buffers bit for bit, and "
        f"{comparison.parameters} parameters and float32 copies of them"
    )


def compare(one: Sequence[StepTrace], other: Sequence[StepTrace]) -> Comparison:
    """How two passes over the same steps compare on all ranks (collective)."""
    differing_here = [differing(left, right) for left, right in zip(one, other, strict=True)]
    counts = [one[0].count(kind) for kind in (GRADIENT, PARAMETER)]
    ours = first_difference(one, other, dist.get_rank()), differing_here, counts
    everyone: list[tuple[Difference | None, list[Counter[str]], list[int]]] = [ours] * dist.get_world_size()
    dist.all_gather_object(everyone, ours)
    found, differing_there, counts_there = zip(*everyone, strict=True)
    return Comparison(
        first=min((each for each in found if each is not None), default=None),
        differing=[sum(ranks, Counter()) for ranks in zip(*differing_there, strict=True)],
        gradients=sum(gradients for gradients, _ in counts_there),
        parameters=sum(parameters for _, parameters in counts_there),
    )


def _steps(run: Run) -> int:
    """How many steps are trained.

    Raises:
        UsageError: when fewer are left than are needed.
    """
    left = run.args.train_iters - run.state.progress.iteration
    if left < LEAST_STEPS:
        raise UsageError(
            f"--tensor-check-interference needs {LEAST_STEPS} iterations, and training has {max(0, left)} left"
        )
    return int(min(max(LEAST_STEPS, run.args.control_iter), left))


def _train(run: Run, steps: int) -> list[StepTrace]:
    """Train `steps` steps from where the state stands, with the capture that `run` has, if any."""
    args, state = run.args, run.state
    data = micro_batches(args, run.datasets.train, consumed=state.progress.consumed_train_samples)
    forward = ForwardStep(run.session)
    traces = []
    with contextlib.closing(data), _gradients_seen(run) as gradients:
        for _ in range(steps):
            step, _ = iterate(run, data, forward)
            traces.append(trace(step, dict(gradients), state.model))
    return traces


def _train_with_capture(run: Run, steps: int) -> tuple[list[StepTrace], CaptureSession]:
    """The same with a session of its own, closed when this returns."""
    recipe, capture = settle(run.args)
    session = attach(run.args, run.state.model, recipe, capture)
    assert session is not None  # settled so
    with contextlib.closing(session):
        traces = _train(replace(run, session=session), steps)
    close_capture(session)
    return traces, session


@contextlib.contextmanager
def _gradients_seen(run: Run) -> Iterator[Prints]:
    """Inside this block, the prints of the present step's gradients, taken when the schedule has finished them."""
    config = run.state.model[0].config
    finish = config.finalize_model_grads_func
    prints: Prints = {}

    def finish_and_look(*args: object, **options: object) -> None:
        finish(*args, **options)
        prints.clear()
        prints.update(gradient_prints(run.state.model))

    config.finalize_model_grads_func = finish_and_look
    try:
        yield prints
    finally:
        config.finalize_model_grads_func = finish


def _require_complete(session: CaptureSession) -> None:
    """See that something was captured, and nothing left out: else that it changed nothing says little (collective).

    Raises:
        SharedFailure: when it was not so on some rank.
    """
    ours = session.failed, session.summary().rows
    everyone = [ours] * dist.get_world_size()
    dist.all_gather_object(everyone, ours)
    for rank, (failed, _) in enumerate(everyone):
        if failed:
            raise SharedFailure(f"{CAN_NOT_TELL}: collecting ended early on rank {rank}: {failed}")
    if not any(rows for _, rows in everyone):
        raise SharedFailure(f"{CAN_NOT_TELL}: nothing was captured; look at --tensor-filter")


def _print_comparison(plain: Sequence[StepTrace], captured: Sequence[StepTrace], comparison: Comparison) -> None:
    rows = [("step", "loss without capture", "loss with capture", "gradients", "parameters")]
    for number, (without, under, counts) in enumerate(zip(plain, captured, comparison.differing, strict=True)):
        losses = f"{without.step.loss:.9g}", f"{under.step.loss:.9g}"
        gradients = _equal(counts[GRADIENT], comparison.gradients)
        parameters = _equal(counts[PARAMETER], comparison.parameters)
        left_out = "" if without.step.updated else ", step left out"
        rows.append((str(number + 1), *losses, gradients, parameters + left_out))
    print_table(rows)
    if not any(each.step.updated for each in plain):
        print_rank_0("every step was left out, no parameter has moved: begin with a smaller --initial-loss-scale")


def _equal(differing: int, total: int) -> str:
    return f"{differing} of {total} differ" if differing else "equal"
