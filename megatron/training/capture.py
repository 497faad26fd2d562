"""Where the trainer meets quantisation and capture: what the flags ask for, attached to the built model."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron.core
from megatron.core import parallel_state
from megatron.core.instrumentation import instrument
from megatron.quantscope.capture import (
    CaptureConfig,
    CaptureError,
    CaptureSession,
    ParallelCoordinates,
    Schedule,
    new_run_id,
)
from megatron.quantscope.columns import aligned
from megatron.quantscope.flags.quantization import UNQUANTIZED
from megatron.quantscope.gemm import QuantConfig
from megatron.training.console import print_rank_0
from megatron.training.failure import TrainingError, UsageError
from megatron.training.model import compute_dtype

MB = 1e6
UNLIMITED = sys.maxsize
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


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
    args.quant_type = recipe.quant_type
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
    args: argparse.Namespace, model: list[Any], recipe: QuantConfig, capture: CaptureConfig
) -> CaptureSession | None:
    """Quantise the model's GEMMs and open the capture (collective).

    Returns:
        The capture session, to be closed at the end; None when nothing is kept.

    Raises:
        UsageError: for a combination that is not allowed.
        TrainingError: when the capture's directory can not be written.
    """
    session = None
    try:
        session = _open_session(args, recipe, capture) if capture.enabled else None
        probed = instrument(model, recipe=recipe, session=session, num_layers=args.num_layers)
    except ValueError as error:
        if session is not None:
            session.close()
        raise UsageError(str(error)) from None
    except CaptureError as error:
        raise TrainingError(str(error)) from None
    if session is not None and not capture.dry_run:
        print_rank_0(f"keeping tensors of {probed} modules a rank in {capture.directory}")
    return session


def print_recipe(recipe: QuantConfig, num_layers: int) -> None:
    """Say which GEMMs are quantised how; nothing when none is."""
    if recipe.quant_type != UNQUANTIZED:
        print_table(recipe.table(num_layers))


def close_capture(session: CaptureSession) -> None:
    """Wait until everything is on disk, and say what was written; a dry run's session is closed without a word.

    Raises:
        TrainingError: when collecting ended early and --tensor-on-error says that this ends the run.
    """
    session.close()
    if session.config.dry_run:
        return
    summary = session.summary()
    print_rank_0(
        f"kept {summary.files} files, {summary.bytes / MB:.1f} MB, {summary.rows} rows of {summary.iterations} "
        f"iterations on rank 0 in {session.config.directory}"
    )
    if session.failed and session.config.stop_on_error:
        raise TrainingError(f"--tensor-on-error stop: {session.failed}")


def _open_session(args: argparse.Namespace, recipe: QuantConfig, config: CaptureConfig) -> CaptureSession:
    label = _DTYPE_NAMES[compute_dtype(args)] if recipe.label == UNQUANTIZED else recipe.label
    return CaptureSession(
        config,
        quant_type=label,
        rank=dist.get_rank(),
        parallel=_coordinates(),
        run_id=_shared_run_id(),
        run_info=run_info(args),
    )


def run_info(args: argparse.Namespace) -> dict[str, Any]:
    """What a reader of the capture may want to know of the run: command, arguments, versions."""
    return {
        "command": sys.argv,
        "arguments": dict(sorted(vars(args).items())),
        "compute_dtype": _DTYPE_NAMES[compute_dtype(args)],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "megatron-core": megatron.core.__version__,
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _coordinates() -> ParallelCoordinates:
    state = parallel_state
    return ParallelCoordinates(
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
    )


def _shared_run_id() -> str:
    """One identifier for all ranks of the run."""
    shared = [new_run_id()]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def print_table(rows: list[tuple[str, ...]], *, numbers: Collection[int] = ()) -> None:
    """Print rows of cells in columns, on the first rank; the columns of `numbers` end on one line."""
    print_rank_0(aligned(rows, right=numbers))
