"""Evaluation: the mean loss on validation or test data, without gradients and without capture.

It runs the model as training does, quantised GEMMs included.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch

from megatron.core.distributed import DistributedDataParallel
from megatron.quantscope.capture import CaptureSession
from megatron.training.data.batches import MicroBatch
from megatron.training.reporting.timing import untimed
from megatron.training.steps import ForwardStep, run_micro_batches


def evaluate(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    data: Iterator[MicroBatch],
    session: CaptureSession | None,
) -> float:
    """The mean loss over the next --eval-iters batches of `data`, the same on every rank."""
    for chunk in model:
        chunk.eval()
    kept = session.suspended() if session is not None else contextlib.nullcontext()
    with torch.no_grad(), kept, untimed(model[0].config):
        losses = [
            run_micro_batches(args, model, data, ForwardStep(), forward_only=True) for _ in range(args.eval_iters)
        ]
    for chunk in model:
        chunk.train()
    return sum(losses) / len(losses)
