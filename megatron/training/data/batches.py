"""Micro-batches on their way to the model: read, put together, moved to the device, with where they come from.

Context parallel ranks read the same samples, and each keeps its share of every sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from megatron.core import parallel_state
from megatron.core.context_parallel import share_of
from megatron.training.data.samplers import SequentialSampler
from megatron.training.exit_signal import reader_start
from megatron.training.failure import TrainingError

WORKERS_WITH_GPU = 2  # Megatron's default; without a GPU the cores are the model's


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward pass; tensors are None on a pipeline stage that needs none.

    s is this rank's share of the sequence, S the whole of it.

    Attributes:
        sample_indices: Place of each sample in the stream.
        document_ids: The documents that each sample is made of (`documents`); (): not known.
        tokens: Input ids [b, s], int64.
        labels: The ids to predict [b, s], int64.
        loss_mask: 1 where a token counts, else 0 [b, s], float32.
        loss_weight: What the mean over this rank's tokens counts for among the context parallel ranks' means, float32;
            None: 1, as for all of them.
        position_ids: Positions [b, s], int64.
        attention_mask: True where attention is not allowed [b, 1, s, S]; None: causal.
    """

    sample_indices: list[int]
    document_ids: tuple[tuple[int, ...], ...] = ()
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    loss_weight: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None


# Tensor -> the dimension of it that runs along the sequence and is shared out.
_SEQUENCE_DIM = {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1, "attention_mask": 2}


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
        worker_init_fn=reader_start(args),
        generator=torch.Generator(),  # else starting to read would move the generator that dropout draws from
    )
    documents = getattr(dataset, "documents", None) if args.save_tensors else None
    for samples in loader:
        indices = samples.pop("sample_index").tolist()
        yield MicroBatch(
            sample_indices=indices,
            document_ids=() if documents is None else tuple(map(documents.of, indices)),
            **_tensors(samples, args),
        )
    raise TrainingError(f"the {len(dataset)} samples of the data are used up")  # type: ignore[arg-type]


def _require_known(ids: torch.Tensor, vocabulary: int) -> None:
    """See that every token is one of the model's.

    Raises:
        TrainingError: naming one that is not; a negative one would be looked up on no rank, or count from the end.
    """
    least, most = (int(each) for each in torch.aminmax(ids))
    if least < 0 or most >= vocabulary:
        raise TrainingError(
            f"the data has token {least if least < 0 else most}, the model's vocabulary has {vocabulary}; was the data "
            "made with this tokenizer?"
        )


def _tensors(samples: dict[str, torch.Tensor], args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch on the device, this rank's share of them."""
    for name in ("tokens", "labels"):
        if name in samples:
            _require_known(samples[name], args.padded_vocab_size)
    device = torch.cuda.current_device()
    tensors = {name: samples[name].to(device, non_blocking=True) for name in _SEQUENCE_DIM if name in samples}
    if args.context_parallel_size == 1:
        return tensors
    rank, ranks = parallel_state.get_context_parallel_rank(), args.context_parallel_size
    shares = {
        name: share_of(tensor, dim=_SEQUENCE_DIM[name], rank=rank, ranks=ranks) for name, tensor in tensors.items()
    }
    if "loss_mask" in tensors and not args.calculate_per_token_loss:
        shares["loss_weight"] = ranks * shares["loss_mask"].sum() / tensors["loss_mask"].sum().clamp(min=1)
    return shares
