"""Where the trainer meets quantisation and capture: what the flags ask for, attached to the built model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from megatron.core import attachment
from megatron.core.resolution import resolve
from megatron.quantscope.capture import CaptureConfig, CaptureError, CaptureSession, Schedule
from megatron.quantscope.columns import aligned
from megatron.quantscope.gemm import QuantConfig
from megatron.quantscope.gemm.resolved import ResolvedModule, table
from megatron.training.console import print_rank_0
from megatron.training.failure import TrainingError, UsageError
from megatron.training.model import compute_dtype

UNLIMITED = sys.maxsize


def settle(args: argparse.Namespace) -> tuple[QuantConfig, CaptureConfig]:
    """What is quantised and what is kept: flag before environment before default, written back into `args`.

    Raises:
        UsageError: for a value that is not allowed.
    """
    try:
        recipe, capture = QuantConfig.from_namespace(args), CaptureConfig.from_namespace(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if rehearses(args):
        capture = _rehearsed(args, capture)
    recipe.write_back(args)
    capture.write_back(args)
    return recipe, capture


def rehearses(args: argparse.Namespace) -> bool:
    """Whether this run only finds something out about capture, and is not to train."""
    return bool(args.tensor_dry_run or args.tensor_check_interference)


def _rehearsed(args: argparse.Namespace, capture: CaptureConfig) -> CaptureConfig:
    """The capture of a rehearsal: on, also without --save-tensors, and from the first step on.

    Raises:
        UsageError: for two rehearsals at once, and for one that has nothing to capture.
    """
    if args.tensor_dry_run and args.tensor_check_interference:
        raise UsageError("--tensor-dry-run and --tensor-check-interference exclude each other: one writes nothing")
    if args.skip_train:
        flag = "--tensor-dry-run" if args.tensor_dry_run else "--tensor-check-interference"
        raise UsageError(f"{flag} needs training steps, and --skip-train leaves none")
    budget = UNLIMITED if args.tensor_dry_run else capture.budget_bytes  # what does not fit is to be counted too
    return replace(capture, enabled=True, schedule=Schedule(), budget_bytes=budget)


def attach(
    args: argparse.Namespace,
    model: list[Any],
    recipe: QuantConfig,
    capture: CaptureConfig,
    modules: Sequence[ResolvedModule] | None = None,
) -> CaptureSession | None:
    """Quantise the model's GEMMs and open the capture (collective); `modules` is what `print_recipe` gave.

    Returns:
        The capture session, to be closed at the end; None when nothing is kept.

    Raises:
        UsageError: for a combination that is not allowed.
        TrainingError: when the capture's directory can not be written.
    """
    try:
        session, sites = attachment.attach(
            args, model, recipe, capture, compute_dtype=compute_dtype(args), modules=modules
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    except CaptureError as error:
        raise TrainingError(str(error)) from None
    if session is not None and not capture.dry_run:
        print_rank_0(f"keeping tensors at {sites} places of all ranks in {capture.directory}")
    return session


def print_recipe(recipe: QuantConfig, model: list[Any], num_layers: int) -> list[ResolvedModule] | None:
    """Say which GEMMs are quantised how (collective).

    Returns:
        Every module and what it becomes; None, and not a word, when nothing is quantised.

    Raises:
        UsageError: for a recipe file that does not fit the model.
    """
    if not recipe.quantizes:
        return None
    try:
        modules = resolve(recipe, model, num_layers)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print_table(table(modules, num_layers))
    return modules


def close_capture(session: CaptureSession) -> None:
    """Wait until everything is on disk, and say what was written; a dry run's session is closed without a word.

    Raises:
        TrainingError: when collecting ended early and --tensor-on-error says that this ends the run.
    """
    session.close()
    if session.config.dry_run:
        return
    print_rank_0(attachment.kept(session))
    if session.failed and session.config.stop_on_error:
        raise TrainingError(f"--tensor-on-error stop: {session.failed}")


def print_table(rows: list[tuple[str, ...]], *, numbers: Collection[int] = ()) -> None:
    """Print rows of cells in columns, on the first rank; the columns of `numbers` end on one line."""
    print_rank_0(aligned(rows, right=numbers))
