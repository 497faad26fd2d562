"""Saving and loading through megatron-core's dist_checkpointing, in the layout of `checkpoint_directory`.

A checkpoint holds the weights, the optimizer's state, the schedules, the random state and the samples consumed; so a
run that stops and continues in the same layout repeats the losses of one that did not, bit for bit. Weights and plain
optimizer state can be loaded into another tensor or pipeline parallel layout; the random state belongs to its layout
and is then left out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import checkpoint_directory
from megatron.training.architecture import architecture_of, require_same_architecture, write_architecture
from megatron.training.checkpoint_directory import RELEASE, Checkpoint
from megatron.training.console import print_rank_0
from megatron.training.failure import TrainingError, UsageError
from megatron.training.model import unwrap
from megatron.training.rng_state import rng_state, set_rng_state

_SCHEDULES = "opt_param_scheduler"  # its name in Megatron-LM's checkpoints
_PROGRESS = ("iteration", "consumed_train_samples", "consumed_valid_samples")
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
)


@dataclass(kw_only=True)
class Progress:
    """How far training has come.

    Attributes:
        iteration: Iterations completed.
        consumed_train_samples: Samples read for training, on all ranks together.
        consumed_valid_samples: Samples read for validation.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0


@dataclass(frozen=True)
class TrainingState:
    """Everything that a checkpoint restores."""

    model: list[Any]
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    progress: Progress


def prepare_save(args: argparse.Namespace) -> None:
    """Look at `--save DIR` before any work is done.

    Raises:
        UsageError: when it can not be written, or holds checkpoints of another model.
    """
    directory = Path(args.save)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable.{args.rank}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--save: {directory} can not be written: {error.strerror or error}") from None
    require_same_architecture(architecture_of(args), directory, "choose another --save")


def save_checkpoint(args: argparse.Namespace, state: TrainingState) -> None:
    """Write a checkpoint into `--save DIR` and make it the latest (collective).

    Raises:
        TrainingError: when it can not be written; the previous one stays the latest.
    """
    progress = state.progress
    contents = {
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_train_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        **_sharded_model(state.model),
    }
    if not args.no_save_optim and state.optimizer is not None and state.scheduler is not None:
        contents["optimizer"] = state.optimizer.sharded_state_dict(contents, metadata=_metadata())
        contents[_SCHEDULES] = state.scheduler.state_dict()
    if not args.no_save_rng:
        contents["rng_state"] = _sharded_rng_state(rng_state())
        contents["rng_layout"] = _layout(args)
    _write(Path(args.save), str(progress.iteration), contents, architecture_of(args))
    print_rank_0(f"saved checkpoint of iteration {progress.iteration} in {args.save}")


def save_model_only(model: list[Any] | Any, directory: str | Path, args: argparse.Namespace) -> None:
    """Write the weights of `model` as the release checkpoint of `directory` (collective).

    Args:
        model: The model or its chunks, bare or wrapped.
        directory: Made if it is not there.
        args: The flags the model was built from; they are kept in `model.json`.

    Raises:
        TrainingError: when it can not be written.
    """
    chunks = model if isinstance(model, list) else [model]
    _write(Path(directory), RELEASE, {"iteration": 0, **_sharded_model(chunks)}, architecture_of(args))


def load_checkpoint(args: argparse.Namespace, state: TrainingState) -> None:
    """Restore `state` from the latest checkpoint of `--load DIR` (collective).

    Weights alone are taken from a release, and with `--finetune`.

    Raises:
        TrainingError: when the checkpoint does not fit the model, or can not be read.
    """
    checkpoint = checkpoint_directory.latest(Path(args.load))
    assert checkpoint is not None  # validation looked
    if not (checkpoint.path / "common.pt").is_file():
        raise TrainingError(f"{checkpoint.path} is not a complete torch_dist checkpoint: common.pt is missing")
    common = _guarded(checkpoint, dist_checkpointing.load_common_state_dict, str(checkpoint.path))
    weights_only = checkpoint.release or args.finetune
    if not weights_only:
        _require_progress(checkpoint, common)
    with_optimizer = not (weights_only or args.no_load_optim or state.optimizer is None) and "optimizer" in common
    with_rng = not (weights_only or args.no_load_rng) and _holds_our_rng_state(args, common)
    contents = _sharded_model(state.model)
    if with_optimizer:
        contents["optimizer"] = state.optimizer.sharded_state_dict(contents, is_loading=True, metadata=_metadata())
    if with_rng:
        contents["rng_state"] = _sharded_rng_state(None)
    loaded = _guarded(checkpoint, dist_checkpointing.load, contents, str(checkpoint.path))
    _restore(state, {name: loaded[name] for name in contents} | {_SCHEDULES: common.get(_SCHEDULES)})
    if not weights_only:
        for name in _PROGRESS:
            setattr(state.progress, name, common[name])
    parts = {"weights": True, "optimizer and schedules": with_optimizer, "random state": with_rng}
    print_rank_0(f"loaded {checkpoint.path}: {', '.join(part for part, is_loaded in parts.items() if is_loaded)}")


def _restore(state: TrainingState, loaded: dict[str, Any]) -> None:
    """Put what was loaded where it belongs."""
    for name, chunk in _chunks(state.model).items():
        unwrap(chunk).load_state_dict(loaded[name])
    if "optimizer" in loaded:
        state.optimizer.load_state_dict(loaded["optimizer"])
        _load_schedules(state.scheduler, loaded[_SCHEDULES])
    elif state.optimizer is not None:
        state.optimizer.reload_model_params()  # its float32 copies were made of the weights before loading
    if "rng_state" in loaded:
        set_rng_state(loaded["rng_state"])


def _load_schedules(scheduler: OptimizerParamScheduler, stored: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(stored)
    except AssertionError as error:
        raise UsageError(
            f"the schedules of the checkpoint are not those of the flags ({error}); give "
            "--override-opt-param-scheduler to take the flags', --use-checkpoint-opt-param-scheduler the checkpoint's"
        ) from None


def _require_progress(checkpoint: Checkpoint, common: dict[str, Any]) -> None:
    missing = [name for name in _PROGRESS if name not in common]
    if missing:
        raise TrainingError(
            f"{checkpoint.path} was written by another trainer: it does not say how far training had come "
            f"({', '.join(missing)} is missing); --finetune takes its weights"
        )


def _holds_our_rng_state(args: argparse.Namespace, common: dict[str, Any]) -> bool:
    stored = common.get("rng_layout")
    if stored not in (None, _layout(args)):
        print_rank_0(f"the checkpoint's random state belongs to another layout ({stored}) and is not loaded")
    return stored == _layout(args)


def _layout(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in _LAYOUT}


def _chunks(model: list[Any]) -> dict[str, Any]:
    """Name in the checkpoint -> model chunk."""
    return {"model" if len(model) == 1 else f"model{number}": chunk for number, chunk in enumerate(model)}


def _sharded_model(model: list[Any]) -> dict[str, Any]:
    return {name: unwrap(chunk).sharded_state_dict(metadata=_metadata()) for name, chunk in _chunks(model).items()}


def _sharded_rng_state(state: dict[str, Any] | None) -> ShardedObject:
    """The random state of this rank's place in the layout; data and context parallel ranks have their own."""
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("rng_state", state, shape, place)


def _metadata() -> dict[str, Any]:
    """How upstream is to lay out what it shards."""
    return {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _write(directory: Path, name: str, contents: dict[str, Any], architecture: dict[str, Any]) -> None:
    first = dist.get_rank() == 0
    try:
        if first:
            checkpoint_directory.prepare(directory, name)
        dist.barrier()
        dist_checkpointing.save(contents, str(checkpoint_directory.being_written(directory, name)))
        dist.barrier()
        if first:
            write_architecture(directory, architecture)
            checkpoint_directory.complete(directory, name)
        dist.barrier()
    except (OSError, RuntimeError, CheckpointException) as error:  # upstream's helper processes pass on what they meet
        if first:
            checkpoint_directory.discard(directory, name)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _last_line(error)
        raise TrainingError(f"the checkpoint can not be written to {directory}: {reason}") from error


def _guarded(checkpoint: Checkpoint, load: Any, *arguments: Any) -> Any:
    """Call `load`; what upstream raises for a broken or foreign checkpoint becomes one line."""
    try:
        return load(*arguments)
    except (Exception, CheckpointException) as error:  # upstream has many kinds, torch's is no Exception
        raise TrainingError(f"{checkpoint.path} can not be loaded into this model: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    """Of an error that carries a traceback in its text, the line that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
