"""The training run: everything built in order, trained, evaluated and closed."""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import replace

from megatron.training.capture import attach, close_capture, print_recipe, rehearses, settle
from megatron.training.checkpoint import checkpointing
from megatron.training.checkpoint.checkpoint_writer import CheckpointWriter
from megatron.training.checkpoint.checkpointing import Progress, TrainingState
from megatron.training.checks import MACHINE_CHECKS, check
from megatron.training.console import print_rank_0
from megatron.training.data.batches import micro_batches
from megatron.training.data.datasets import build_datasets
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.evaluation import evaluate
from megatron.training.exit_signal import ExitSignal
from megatron.training.initialize import finalize, initialize
from megatron.training.loop import Run, train
from megatron.training.model import build_bare_chunks, wrap_for_training
from megatron.training.optimizer import build_optimizer, build_scheduler
from megatron.training.rehearsal.dry_run import dry_run
from megatron.training.rehearsal.interference import check_interference
from megatron.training.reporting.progress import ProgressLog
from megatron.training.reporting.tensor_board import show_tensors
from megatron.training.reporting.timing import attach_timers
from megatron.training.steps import connect
from megatron.training.te_layer_spec import require_engine
from megatron.training.validation import loads_weights


def pretrain(args: argparse.Namespace) -> None:
    """Train as `args` say, from the process group to the last checkpoint, or rehearse the capture (collective).

    Raises:
        UsageError: when the arguments can not be honoured.
        TrainingError: when the run can not go on, or a rehearsal ends badly.
    """
    with contextlib.ExitStack() as at_the_end:
        check(args, MACHINE_CHECKS)
        require_engine(args)
        at_the_end.callback(finalize)
        start = time.monotonic()
        initialize(args)
        run = build(args, at_the_end, start)
        if args.tensor_dry_run:
            dry_run(run)
        elif args.tensor_check_interference:
            check_interference(run)
        elif args.skip_train or train(run):
            _evaluate_at_the_end(run)


def build(args: argparse.Namespace, at_the_end: contextlib.ExitStack, start: float) -> Run:
    """Build everything a run needs; `at_the_end` closes what has to be closed."""
    recipe, capture = settle(args)
    tokenizer = build_tokenizer(args)
    if rehearses(args):
        args.tensorboard_dir = None
    elif args.save:
        checkpointing.prepare_save(args)
    exit_signal = at_the_end.enter_context(ExitSignal.of(args))  # before the capture, which then leaves it to this
    log = ProgressLog(args)
    at_the_end.callback(log.close)
    datasets = build_datasets(args, tokenizer)
    state = _build_state(args)
    log.timers = attach_timers(args, state.model, state.optimizer)
    modules = print_recipe(recipe, state.model, args.num_layers)
    enabled = capture.enabled and not args.tensor_check_interference  # which attaches it when its turn has come
    session = attach(args, state.model, recipe, replace(capture, enabled=enabled), modules)
    if session is not None:
        show_tensors(args, session, at_the_end)
        at_the_end.callback(close_capture, session)
    print_rank_0(f"ready after {time.monotonic() - start:.1f} s")
    return Run(
        args=args,
        state=state,
        datasets=datasets,
        session=session,
        log=log,
        writer=CheckpointWriter.of(args, on_complete=lambda name: log.note("Saved checkpoint", int(name))),
        exit_signal=exit_signal,
        start=start,
    )


def _build_state(args: argparse.Namespace) -> TrainingState:
    """Model, optimizer and schedules: new, or from --load."""
    args.weights_are_loaded = loads_weights(args)
    model = wrap_for_training(args, build_bare_chunks(args))
    optimizer = None if args.skip_train else build_optimizer(args, model)
    scheduler = None if optimizer is None else build_scheduler(args, optimizer)
    state = TrainingState(model, optimizer, scheduler, Progress())
    if args.weights_are_loaded:
        checkpointing.load_checkpoint(args, state)
    connect(args, model, optimizer)
    return state


def _evaluate_at_the_end(run: Run) -> None:
    """The loss on validation and test data, where there is any and its loss is not known from --eval-interval."""
    for name, dataset, consumed in (
        ("validation", run.datasets.valid, run.state.progress.consumed_valid_samples),
        ("test", run.datasets.test, 0),
    ):
        if dataset is not None and not run.log.has_evaluation(name, run.state.progress.iteration):
            data = micro_batches(run.args, dataset, consumed=consumed)
            loss = evaluate(run.args, run.state.model, data, run.session)
            run.log.add_evaluation(name, run.state.progress.iteration, loss)
