"""Process group, model parallel groups, random seeds and batch arithmetic: everything that precedes the model.

A single process needs no launcher: its group lives in memory, without a port that another run could hold. With torchrun
the group comes from its environment.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import random
import warnings

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import destroy_rerun_state_machine, initialize_rerun_state_machine
from megatron.training.failure import UsageError

PIPELINE_SEED_STEP = 100  # Megatron's: stages draw different weights ...
DATA_SEED_STEP = 10  # ... and so do data parallel ranks, if asked to
# What upstream says about packages that are not needed here, and about CPU generators standing in for CUDA's.
KNOWN_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    ".*falling back to.*",
    "CPU RNG state changed within GPU RNG context",
    "The pad token id in the tokenizer collides.*",
    ".*is deprecated.*",
    "If you are using transformer_engine as the transformer implementation.*",
    ".*we are deprecating ShardedTensor.*",
    "The .grad attribute of a Tensor that is not a leaf.*",
)


def initialize(args: argparse.Namespace) -> None:
    """Set up this process as one rank of the job `args` describe; `finalize` undoes it.

    Raises:
        UsageError: when there are to be more ranks, and nothing says where to meet them.
    """
    for message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("megatron.core").setLevel(logging.ERROR if args.logging_level is None else args.logging_level)
    if args.logging_level is not None:
        logging.basicConfig(level=args.logging_level)
    if args.tensor_model_parallel_size > 1:
        # Upstream's kernels overlap as meant only if the GPU takes them in the order they were launched in.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    _join_process_group(args)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    _seed(args)
    init_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    initialize_rerun_state_machine()


def finalize() -> None:
    """Leave the job, as far as it was joined; a process without a launcher can then join another."""
    parallel_state.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_process_group(args: argparse.Namespace) -> None:
    backend = args.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if args.world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise UsageError(f"WORLD_SIZE is {args.world_size} and MASTER_ADDR is not set; start the ranks with torchrun")
    if backend == "gloo" and _gathers_unevenly(args):
        raise UsageError(
            "--moe-token-dispatcher-type alltoall with --expert-tensor-parallel-size "
            f"{args.expert_tensor_parallel_size} gathers as many rows as each rank happens to have, which gloo can "
            "not; give allgather"
        )
    rendezvous = {"store": dist.HashStore()} if args.world_size == 1 else {}
    dist.init_process_group(
        backend,
        rank=args.rank,
        world_size=args.world_size,
        timeout=datetime.timedelta(minutes=args.distributed_timeout_minutes),
        **rendezvous,
    )


def _gathers_unevenly(args: argparse.Namespace) -> bool:
    """Whether ranks that share an expert have different numbers of its tokens."""
    split = args.num_experts is not None and args.expert_tensor_parallel_size > 1
    return split and args.moe_token_dispatcher_type == "alltoall" and not args.moe_pad_expert_input_to_capacity


def _seed(args: argparse.Namespace) -> None:
    seed = args.seed + PIPELINE_SEED_STEP * parallel_state.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += DATA_SEED_STEP * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - upstream draws from the global generators
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
