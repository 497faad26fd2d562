"""What every trainer does to a built model: quantise it and open its capture; Megatron says where this rank stands.

This tree's trainer and a stock one (`script/instrument.py`) meet quantisation and capture here. Each gives its parsed
arguments, which both keep under Megatron-LM's names; where this rank stands is asked of `parallel_state`.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron.core
from megatron.core import parallel_state
from megatron.core.instrumentation import instrument
from megatron.core.resolution import resolve
from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates, new_run_id
from megatron.quantscope.flags.quantization import UNQUANTIZED
from megatron.quantscope.gemm import QuantConfig
from megatron.quantscope.gemm.resolved import ResolvedModule, grouped

MB = 1e6
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def attach(
    args: argparse.Namespace,
    model: list[Any],
    recipe: QuantConfig,
    capture: CaptureConfig,
    *,
    compute_dtype: torch.dtype,
    modules: Sequence[ResolvedModule] | None = None,
) -> tuple[CaptureSession | None, int]:
    """Quantise the model's GEMMs and open the capture (collective).

    Args:
        args: The trainer's, under Megatron-LM's names.
        model: This rank's chunks.
        recipe: What is quantised how.
        capture: What is kept.
        compute_dtype: Of the model.
        modules: What `resolve` gave for this recipe and model; None: it is asked.

    Returns:
        The capture session, to be closed at the end, None when nothing is kept; and at how many places of all ranks
        together tensors are kept.

    Raises:
        ValueError: for a combination that is not allowed, a recipe file that does not fit the model, or a capture of
            nothing.
        CaptureError: when the capture's directory can not be written.
    """
    if modules is None:
        modules = resolve(recipe, model, args.num_layers)
    info = run_info(args, compute_dtype) | {"quantization": recipe.describe() | {"modules": grouped(modules)}}
    session = _open_session(recipe, capture, info) if capture.enabled else None
    try:
        instrument(model, recipe=recipe, session=session, num_layers=args.num_layers)
        return session, 0 if session is None else _sites_of_all_ranks(session)
    except ValueError:
        if session is not None:
            session.close()
        raise


def run_info(args: argparse.Namespace, compute_dtype: torch.dtype) -> dict[str, Any]:
    """What a reader of the capture may want to know of the run: command, arguments, versions."""
    return {
        "command": sys.argv,
        "arguments": dict(sorted(vars(args).items())),
        "compute_dtype": _DTYPE_NAMES[compute_dtype],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "megatron-core": megatron.core.__version__,
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def gradient_scale(args: argparse.Namespace, optimizer: Any) -> float:
    """What this iteration's gradients are multiplied by, against their part in the gradient of the mean loss.

    A rank's loss is the mean over its own micro-batches, times the loss scale; DistributedDataParallel takes the mean
    over data and context parallel ranks when the gradients of weights are complete. With --calculate-per-token-loss a
    rank's loss is a sum, ranks are added up, and the number of tokens is divided off at the end: gradients are then
    those of the summed loss, times the loss scale.
    """
    scaled = args.fp16 or args.loss_scale
    loss_scale = float(optimizer.get_loss_scale()) if scaled else 1.0  # waits for the device, hence not always
    if args.calculate_per_token_loss:
        return loss_scale
    return loss_scale * parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def kept(session: CaptureSession) -> str:
    """What a closed session has kept, in the line that the first rank prints."""
    summary = session.summary()
    return (
        f"kept {summary.files} files, {summary.bytes / MB:.1f} MB, {summary.rows} rows of {summary.iterations} "
        f"iterations on rank 0 in {session.config.directory}"
    )


def _open_session(recipe: QuantConfig, config: CaptureConfig, info: dict[str, Any]) -> CaptureSession:
    return CaptureSession(
        config,
        quant_type=info["compute_dtype"] if recipe.label == UNQUANTIZED else recipe.label,
        rank=dist.get_rank(),
        parallel=_coordinates(),
        run_id=_shared_run_id(),
        run_info=info,
    )


def _sites_of_all_ranks(session: CaptureSession) -> int:
    """How many places are kept, over all ranks; one rank alone may have none."""
    sites = [0] * dist.get_world_size()
    dist.all_gather_object(sites, session.sites)
    if not any(sites):
        raise ValueError("--tensor-filter matches no module of the model: no tensor would be kept")
    return sum(sites)


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
        etp_rank=state.get_expert_tensor_parallel_rank(),
        etp_size=state.get_expert_tensor_parallel_world_size(),
    )


def _shared_run_id() -> str:
    """One identifier for all ranks of the run."""
    shared = [new_run_id()]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
