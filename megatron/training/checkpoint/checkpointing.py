"""Saving and loading through megatron-core's dist_checkpointing, in the layout of `checkpoint_directory`.

A checkpoint holds the weights, the optimizer's state, the schedules, the random state and the samples consumed; so a
run that stops and continues in the same layout repeats the losses of one that did not, bit for bit.

In another layout weights and plain optimizer state can be loaded, too. The distributed optimizer's state is written as
its buffers lie (only the data parallel size may change then), or with --dist-ckpt-optim-fully-reshardable gathered and
parameter by parameter (any layout). The random state belongs to its layout and is left out in another.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.checkpoint import checkpoint_directory
from megatron.training.checkpoint.architecture import architecture_of, require_same_architecture
from megatron.training.checkpoint.checkpoint_directory import RELEASE, Checkpoint
from megatron.training.checkpoint.checkpoint_writer import CheckpointWriter, last_line
from megatron.training.checkpoint.optimizer_state import complete_state, restore_state
from megatron.training.checkpoint.optimizer_traits import (
    ANY_LAYOUT,
    TRAITS,
    WITHOUT_IT,
    require_same_traits,
    traits_of,
)
from megatron.training.checkpoint.rng_state import rng_state, set_rng_state
from megatron.training.console import print_rank_0
from megatron.training.failure import TrainingError, UsageError
from megatron.training.model import unwrap

_SCHEDULES = "opt_param_scheduler"  # its name in Megatron-LM's checkpoints
_ALWAYS_THERE = (".metadata", "metadata.json")  # the last one is written last
_PROGRESS = ("iteration", "consumed_train_samples", "consumed_valid_samples")
_SHARDING = "distrib_optim_sharding_type"  # of the distributed optimizer's state; its name in Megatron-LM's checkpoints
_LAYOUT = {
    "tensor": parallel_state.get_tensor_model_parallel_world_size,
    "pipeline": parallel_state.get_pipeline_model_parallel_world_size,
    "virtual pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size,
    "expert": parallel_state.get_expert_model_parallel_world_size,
    "expert tensor": parallel_state.get_expert_tensor_parallel_world_size,
    "context": parallel_state.get_context_parallel_world_size,
    "data": parallel_state.get_data_parallel_world_size,
}
# In what torch, pickle and json say of a file that was cut off, changed or removed.
_SIGNS_OF_DAMAGE = (
    "EOFError",
    "corrupted",
    "truncated",
    "Ran out of input",
    "global metadata read failed",
    "JSONDecodeError",
    "UnicodeDecodeError",
    "UnpicklingError",
    "No such file",
)
_LONGEST_REASON = 300  # characters: megatron-core lists all names of a checkpoint that one is not among
_OF_DATA = ("context", "data")  # sizes that the distributed optimizer's buffers do not depend on


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


def save_checkpoint(args: argparse.Namespace, state: TrainingState, writer: CheckpointWriter) -> None:
    """Write a checkpoint into `--save DIR` and make it the latest, or with --async-save begin to (collective).

    Raises:
        TrainingError: when it can not be written; the previous one stays the latest.
    """
    if args.use_distributed_optimizer and args.overlap_param_gather:
        for chunk in state.model:
            chunk.start_param_sync(force_sync=True)  # else the other ranks' shards are as they were before the step
    progress, metadata = state.progress, _metadata(_sharding_type(args))
    contents = {
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_train_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "layout": _layout(),
        TRAITS: traits_of(args),
        "has_rng_state": not args.no_save_rng,
        **_sharded_model(state.model, metadata),
    }
    if not args.no_save_optim and state.optimizer is not None and state.scheduler is not None:
        complete_state(state.optimizer)
        contents["optimizer"] = state.optimizer.sharded_state_dict(contents, metadata=metadata)
        contents[_SCHEDULES] = state.scheduler.state_dict()
    if not args.no_save_rng:
        contents["rng_state"] = _sharded_rng_state(rng_state())
    writer.write(
        Path(args.save),
        str(progress.iteration),
        contents,
        architecture=architecture_of(args),
        metadata=_storable(metadata),
        announcement=f"saved checkpoint of iteration {progress.iteration} in {args.save}",
    )


def save_model_only(model: list[Any] | Any, directory: str | Path, args: argparse.Namespace) -> None:
    """Write the weights of `model` as the release checkpoint of `directory` (collective).

    Args:
        model: The model or its chunks, bare or wrapped.
        directory: Made if it is not there.
        args: The flags the model was built from; they are kept in `model.json`.

    Raises:
        TrainingError: when it can not be written.
    """
    chunks, metadata = model if isinstance(model, list) else [model], _metadata(None)
    contents = {"iteration": 0, **_sharded_model(chunks, metadata)}
    architecture, stored = architecture_of(args), _storable(metadata)
    CheckpointWriter().write(Path(directory), RELEASE, contents, architecture=architecture, metadata=stored)


def load_checkpoint(args: argparse.Namespace, state: TrainingState) -> None:
    """Restore `state` from the latest checkpoint of `--load DIR`, or that of --ckpt-step (collective).

    Weights alone are taken from a release, and with `--finetune`.

    Raises:
        TrainingError: when the checkpoint does not fit the model, or can not be read.
        UsageError: when its optimizer state can not be loaded under these flags.
    """
    checkpoint = checkpoint_directory.chosen(Path(args.load), args.ckpt_step)
    assert checkpoint is not None  # validation looked
    missing = [name for name in _ALWAYS_THERE if not (checkpoint.path / name).is_file()]
    if missing:
        raise TrainingError(
            f"{checkpoint.path} is not a complete torch_dist checkpoint: {', '.join(missing)} is missing"
        )
    common = _guarded(checkpoint, dist_checkpointing.load_common_state_dict, str(checkpoint.path))
    weights_only = checkpoint.release or args.finetune
    if not weights_only:
        _require_progress(checkpoint, common)
    with_optimizer = not (weights_only or args.no_load_optim or state.optimizer is None) and _SCHEDULES in common
    with_rng = not (weights_only or args.no_load_rng) and _holds_our_rng_state(common)
    stored = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata = _metadata(stored.get(_SHARDING))
    contents = _sharded_model(state.model, metadata)
    if with_optimizer:
        _require_loadable_optimizer(args, checkpoint, common, metadata.get(_SHARDING))
        complete_state(state.optimizer)
        contents["optimizer"] = state.optimizer.sharded_state_dict(contents, is_loading=True, metadata=metadata)
    if with_rng:
        contents["rng_state"] = _sharded_rng_state(None)
    loaded = _guarded(checkpoint, dist_checkpointing.load, contents, str(checkpoint.path))
    _restore(checkpoint, state, {name: loaded[name] for name in contents} | {_SCHEDULES: common.get(_SCHEDULES)})
    if not weights_only:
        for name in _PROGRESS:
            setattr(state.progress, name, common[name])
    parts = {"weights": True, "optimizer and schedules": with_optimizer, "random state": with_rng}
    print_rank_0(f"loaded {checkpoint.path}: {', '.join(part for part, is_loaded in parts.items() if is_loaded)}")
    if not (weights_only or with_optimizer or state.optimizer is None):
        print_rank_0("no optimizer state is loaded: moments and schedules, of the learning rate too, start anew")


def _restore(checkpoint: Checkpoint, state: TrainingState, loaded: dict[str, Any]) -> None:
    """Put what was loaded where it belongs."""
    for name, chunk in _chunks(state.model).items():
        unwrap(chunk).load_state_dict(loaded[name])
    if "optimizer" in loaded:
        _guarded(checkpoint, restore_state, state.optimizer, loaded["optimizer"])
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


def _require_loadable_optimizer(
    args: argparse.Namespace, checkpoint: Checkpoint, common: dict[str, Any], sharding: str | None
) -> None:
    """See that the optimizer's state is of this kind of optimizer, and can be brought into this layout.

    Raises:
        UsageError: when it is not, or can not.
    """
    if bool(sharding) != args.use_distributed_optimizer:
        kind, flag = ("distributed", "needs") if sharding else ("plain", "excludes")
        raise UsageError(
            f"{checkpoint.path} holds the state of the {kind} optimizer, which {flag} --use-distributed-optimizer; "
            f"{WITHOUT_IT}"
        )
    require_same_traits(args, checkpoint.path, common.get(TRAITS, {}), sharding)
    stored, ours = common.get("layout", {}), _layout()
    other = [name for name in ours if name not in _OF_DATA and stored.get(name, ours[name]) != ours[name]]
    if sharding and sharding not in ANY_LAYOUT and other:
        sizes = ", ".join(f"{name} {stored[name]} there and {ours[name]} here" for name in other)
        raise UsageError(
            f"{checkpoint.path} holds the distributed optimizer's state for its own layout (parallel sizes: {sizes}); "
            f"write it with --dist-ckpt-optim-fully-reshardable to load it into another; {WITHOUT_IT}"
        )
    if (stored.get("expert", ours["expert"]) > 1) != (ours["expert"] > 1):
        raise UsageError(
            f"{checkpoint.path} holds the optimizer's state under expert parallel size {stored['expert']}, here it is "
            f"{ours['expert']}; megatron-core keeps an optimizer for experts only above 1; {WITHOUT_IT}"
        )


def _holds_our_rng_state(common: dict[str, Any]) -> bool:
    stored, ours = common.get("layout"), _layout()
    if stored not in (None, ours):
        sizes = ", ".join(f"{name} {stored.get(name)}" for name in ours if stored.get(name) != ours[name])
        print_rank_0(f"the checkpoint's random state belongs to another layout ({sizes}) and is not loaded")
    return stored == ours and common.get("has_rng_state", False)


def _layout() -> dict[str, int]:
    """Parallel sizes by their names."""
    return {name: size() or 1 for name, size in _LAYOUT.items()}


def _chunks(model: list[Any]) -> dict[str, Any]:
    """Name in the checkpoint -> model chunk."""
    return {"model" if len(model) == 1 else f"model{number}": chunk for number, chunk in enumerate(model)}


def _sharded_model(model: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: unwrap(chunk).sharded_state_dict(metadata=metadata) for name, chunk in _chunks(model).items()}


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


def _sharding_type(args: argparse.Namespace) -> str | None:
    """How the distributed optimizer's state is to be laid out; None: there is none.

    megatron-core before 0.15 has but one way that works with torch's Adam, which suits any layout.
    """
    if not args.use_distributed_optimizer:
        return None
    if "fully_reshardable" not in getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ()):
        return "fully_sharded_model_space"
    return "fully_reshardable" if args.dist_ckpt_optim_fully_reshardable else "dp_reshardable"


def _metadata(sharding: str | None) -> dict[str, Any]:
    """How upstream is to lay out what it shards."""
    return {
        **({_SHARDING: sharding} if sharding else {}),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _storable(metadata: dict[str, Any]) -> dict[str, Any]:
    """What of it a checkpoint keeps."""
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}


def _guarded(checkpoint: Checkpoint, load: Any, *arguments: Any) -> Any:
    """Call `load`; what upstream raises for a broken or foreign checkpoint becomes one line."""
    try:
        return load(*arguments)
    except (Exception, CheckpointException) as error:  # upstream has many kinds, torch's is no Exception
        text = f"{type(error).__name__}: {error}"
        is_damaged = any(sign in text for sign in _SIGNS_OF_DAMAGE)
        what = "a file is incomplete or damaged" if is_damaged else "can not be loaded into this model"
        reason = textwrap.shorten(last_line(error), _LONGEST_REASON)
        raise TrainingError(f"{checkpoint.path}{':' * is_damaged} {what}: {reason}") from error
