"""Micro-batches on their way to the model: read, put together, moved to the device, with their sample indices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.core import parallel_state
from megatron.training.failure import TrainingError
from megatron.training.samplers import SequentialSampler

WORKERS_WITH_GPU = 2  # Megatron's default; without a GPU the cores are the model's


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward pass; tensors are None on a pipeline stage that needs none.

    Attributes:
        sample_indices: Place of each sample in the stream.
        tokens: Input ids [b, s], int64.
        labels: The ids to predict [b, s], int64.
        loss_mask: 1 where a token counts, else 0 [b, s], float32.
        position_ids: Positions [b, s], int64.
        attention_mask: True where attention is not allowed [b, 1, s, s]; None: causal.
    """

    sample_indices: list[int]
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None


_TENSORS = tuple(field.name for field in fields(MicroBatch) if field.name != "sample_indices")


def micro_batches(args: argparse.Namespace, dataset: Dataset | None, *, consumed: int) -> Iterator[MicroBatch]:
    """This rank's micro-batches of `dataset`, from sample `consumed` on.

    Raises:
        TrainingError: when the samples are used up, or hold a token that the model does not have.
    """
    if dataset is None:
        return
    sampler = SequentialSampler(
        total=len(dataset),  # type: ignore[arg-type]
        consumed=consumed,
        micro_batch_size=args.micro_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        ranks=parallel_state.get_data_parallel_world_size(),
    )
    on_gpu = torch.cuda.is_available()
    workers = args.num_workers if args.num_workers is not None else WORKERS_WITH_GPU * on_gpu
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,  # type: ignore[arg-type]
        num_workers=workers,
        pin_memory=on_gpu,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # else starting to read would move the generator that dropout draws from
    )
    for samples in loader:
        yield _on_device(samples, args.padded_vocab_size)
    raise TrainingError(f"the {len(dataset)} samples of the data are used up")  # type: ignore[arg-type]


def _on_device(samples: dict[str, Any], vocabulary: int) -> MicroBatch:
    indices = samples.pop("sample_index").tolist()
    for name in ("tokens", "labels"):
        if name in samples and int(samples[name].max()) >= vocabulary:
            raise TrainingError(
                f"the data has token {int(samples[name].max())}, the model's vocabulary has {vocabulary}; was the data "
                "made with this tokenizer?"
            )
    device = torch.cuda.current_device()
    tensors = {name: samples[name].to(device, non_blocking=True) for name in _TENSORS if name in samples}
    return MicroBatch(sample_indices=indices, **tensors)
