"""What this machine, or its torch, does not have. The one table here that asks torch, and only about a flag it is for.

It is walked before anything is built.
"""

from __future__ import annotations

import argparse

from megatron.training.checks.table import Check


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_nccl() -> bool:
    import torch.distributed

    return torch.distributed.is_nccl_available() and _has_gpu()


def _traces_nowhere(args: argparse.Namespace) -> bool:
    return args.profile and not (args.tensorboard_dir or args.save)


MACHINE_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.distributed_backend == "nccl" and not _has_nccl(),
        "--distributed-backend nccl needs a GPU and a torch that was built with NCCL; give gloo, or leave it out",
    ),
    (
        lambda a: a.record_memory_history and not _has_gpu(),
        "--record-memory-history records the memory of a GPU, and there is none",
    ),
    (
        lambda a: _traces_nowhere(a) and not _has_gpu(),
        "--profile without a GPU writes a trace to --tensorboard-dir or --save: give one",
    ),
)
