"""Training, validation and test data: megatron-core's datasets, checked before they are built.

What is not needed is not built: no validation data when nothing is evaluated. Building an index over files that hold no
tokens would never end upstream, so each file and each share is looked at first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.dataset_helpers import how_to_compile
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.training.console import print_rank_0
from megatron.training.data.data_files import sequence_lengths
from megatron.training.data.documents import Documents
from megatron.training.data.mock_data import MockData
from megatron.training.failure import UsageError
from megatron.training.validation import prefixes_of

SPLIT_NAMES = ("training", "validation", "test")
MID_LEVEL_SURPLUS = 0.005  # Megatron's: samples drawn from each part of a blend beyond its share


class IndexedSamples(torch.utils.data.Dataset):
    """A dataset whose items say which sample of the stream they are (`sample_index`).

    Attributes:
        samples: The dataset.
        documents: Says which documents its samples are made of.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.documents = Documents(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.samples[index], "sample_index": index}


class SampleIndices(torch.utils.data.Dataset):
    """The samples of a pipeline stage that reads no tokens: their places in the stream alone.

    Attributes:
        length: Number of samples.
        documents: Says which documents they are made of; None: not known.
    """

    def __init__(self, length: int, documents: Documents | None) -> None:
        self.length = length
        self.documents = documents

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample_index": index}


@dataclass(frozen=True)
class Datasets:
    """What a run reads; None where it reads nothing."""

    train: torch.utils.data.Dataset | None
    valid: torch.utils.data.Dataset | None
    test: torch.utils.data.Dataset | None


def build_datasets(args: argparse.Namespace, tokenizer: Any) -> Datasets:
    """Build the datasets of the run (collective: every rank calls it).

    Every tensor and context parallel rank reads its data itself, so that nothing is broadcast. A pipeline stage between
    the first and the last reads none; it builds the index when tensors are kept, which are kept with their documents.

    Raises:
        UsageError: for files that are broken, hold nothing to train on, or can not be indexed.
    """
    sizes = samples_needed(args)
    config = _config(args, tokenizer)
    if config.mock:
        config.split_matrix = [split if size else None for split, size in zip(config.split_matrix, sizes, strict=True)]
    else:
        _leave_out_what_is_not_needed(config, sizes)
        _look_at_files(args, config)
    reads = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    kind = MockData if config.mock else GPTDataset
    try:
        built = BlendedMegatronDatasetBuilder(kind, sizes, lambda: reads or args.save_tensors, config).build()
    except Exception as error:
        reason = error.__cause__ or error  # upstream wraps it in an Exception
        if line := how_to_compile(reason):
            raise UsageError(line) from None
        if not isinstance(reason, OSError):
            raise
        raise UsageError(f"the index of the data can not be written: {reason}; give --data-cache-path DIR") from None
    wanted = [_is_read(config, split) and size > 0 for split, size in enumerate(sizes)]
    if reads:
        return Datasets(*(None if samples is None else IndexedSamples(samples) for samples in built))
    return Datasets(
        *(
            SampleIndices(size, None if samples is None else Documents(samples)) if want else None
            for size, samples, want in zip(sizes, built, wanted, strict=True)
        )
    )


def samples_needed(args: argparse.Namespace) -> list[int]:
    """Training, validation and test samples that the run will read."""
    evaluations = args.train_iters // args.eval_interval + 1
    train = args.train_iters * args.global_batch_size
    if args.train_samples:  # the last batch may go beyond them
        train = min(train, args.train_samples + args.global_batch_size - 1)
    evaluated = args.eval_iters * args.global_batch_size
    return [0 if args.skip_train else train, evaluations * evaluated, evaluated]


def _config(args: argparse.Namespace, tokenizer: Any) -> GPTDatasetConfig:
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    sources: dict[str, Any] = {}
    if args.data_path:
        sources = {"blend": get_blend_from_list(args.data_path), "split": args.split}
    elif args.train_data_path:
        sources = {"blend_per_split": [get_blend_from_list(paths) for paths in per_split]}
    return GPTDatasetConfig(
        **sources,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=tokenizer,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,  # else attention is causal by itself
        mid_level_dataset_surplus=MID_LEVEL_SURPLUS,
    )


def _leave_out_what_is_not_needed(config: GPTDatasetConfig, sizes: Sequence[int]) -> None:
    sources = config.blend_per_split or config.split_matrix
    for split, size in enumerate(sizes):
        if not size:
            sources[split] = None


def _is_read(config: GPTDatasetConfig, split: int) -> bool:
    return (config.blend_per_split or config.split_matrix)[split] is not None


def _look_at_files(args: argparse.Namespace, config: GPTDatasetConfig) -> None:
    """Look at every file that will be read; a share for evaluation that holds nothing is left out.

    Raises:
        UsageError: see `build_datasets`.
    """
    sources = config.blend_per_split or config.split_matrix
    paths = (args.train_data_path, args.valid_data_path, args.test_data_path)
    for split, name in enumerate(SPLIT_NAMES):
        if not _is_read(config, split):
            continue
        share = config.split_matrix[split] if args.data_path else (0.0, 1.0)
        for prefix in prefixes_of(args.data_path or paths[split]):
            lengths = sequence_lengths(prefix)
            first, last = (round(bound * len(lengths)) for bound in share)
            if not lengths[first:last].any():
                share_of = f"--split {args.split} of " if args.data_path else ""
                missing = f"{prefix} holds no tokens for {name}: {share_of}{len(lengths)} sequences"
                if split == 0:
                    raise UsageError(missing)
                print_rank_0(f"{missing}; there will be no {name}")
                sources[split] = None
                break
