"""One training step: forward and backward over the micro-batches by megatron-core's schedule, then the optimizer."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.attachment import gradient_scale
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.quantscope.capture import CaptureSession
from megatron.training.data.batches import MicroBatch
from megatron.training.reporting.timing import OPTIMIZER, timed

LOSS = "lm loss"


@dataclass
class ForwardStep:
    """What the schedule calls for each micro-batch; tells the capture session which samples are coming.

    Attributes:
        session: What keeps tensors; None: nothing does.
        grad_scale: What gradients are multiplied by (`gradient_scale`); the session is told.
    """

    session: CaptureSession | None = None
    grad_scale: float = field(default=1.0, init=False)
    _drawn: Counter[int] = field(default_factory=Counter, init=False)

    def begin_iteration(self) -> None:
        """Count micro-batches from 0 again."""
        self._drawn.clear()

    def __call__(self, data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run the model on the next micro-batch.

        Micro-batches are counted by the iterator that they come from: under an interleaved schedule each model chunk
        has one of its own over the same samples, and the chunks take turns.

        Returns:
            The model's output (the loss of each token [b, s] on the last stage) and what turns it into a loss.
        """
        batch = next(data)
        if self.session is not None:
            self.session.begin_micro_batch(
                self._drawn[id(data)],
                batch.sample_indices,
                document_ids=batch.document_ids,
                grad_scale=self.grad_scale,
            )
        self._drawn[id(data)] += 1
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
        return output, functools.partial(summed_loss, batch.loss_mask, weight=batch.loss_weight)


def summed_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor, *, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss summed over the tokens that count, their number, and both to be reported.

    megatron-core divides by the number itself: for each micro-batch, or over the batch (--calculate-per-token-loss).
    It then takes the mean of the context parallel ranks' means, which is the mean over their tokens only if each has as
    many that count; else `weight` makes it that.

    Args:
        loss_mask: 1 where a token counts [b, s].
        losses: Loss of each token [b, s].
        weight: Multiplied on the sum, not on what is reported; None: 1.
    """
    total = torch.sum(losses.float().view(-1) * loss_mask.view(-1))
    count = loss_mask.sum()
    reported = {LOSS: torch.stack([total.detach(), count])}
    return total if weight is None else total * weight, count.to(torch.int), reported


def connect(
    args: argparse.Namespace, model: list[DistributedDataParallel], optimizer: MegatronOptimizer | None
) -> None:
    """Tell the model's configuration how gradients are scaled, synchronised and finished."""
    config = model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = _each(model, "no_sync")
    if args.overlap_grad_reduce:
        config.grad_sync_func = _each(model, "start_grad_sync")
    if args.overlap_param_gather:
        config.param_sync_func = _each(model, "start_param_sync")


def _each(model: list[DistributedDataParallel], method: str) -> Any:
    methods = [getattr(chunk, method) for chunk in model]
    return methods[0] if len(methods) == 1 else methods


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a training step came to.

    Attributes:
        loss: Mean loss of its tokens over all ranks.
        grad_norm: Before clipping; None when it is not clipped.
        zeros: Zeros in the gradient; None when not counted.
        updated: The optimizer changed the weights; False when the loss scale was too large.
        finite: Loss and gradients were; when not, and that is checked, nothing was updated.
    """

    loss: float
    grad_norm: float | None
    zeros: float | None
    updated: bool
    finite: bool


def train_step(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    data: Iterator[MicroBatch],
    forward: ForwardStep,
) -> Step:
    """Forward, backward and one step of the optimizer over the micro-batches of one iteration."""
    if forward.session is not None:
        forward.grad_scale = gradient_scale(args, optimizer)
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss = run_micro_batches(args, model, data, forward, forward_only=False)
    if args.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    if args.check_for_nan_in_loss_and_grad and not args.fp16 and not _all_finite(loss, model):
        return Step(loss=loss, grad_norm=None, zeros=None, updated=False, finite=False)
    with timed(model[0].config, OPTIMIZER):
        updated, grad_norm, zeros = optimizer.step()
    if args.empty_unused_memory_level >= 2:
        torch.cuda.empty_cache()
    return Step(
        loss=loss,
        grad_norm=None if grad_norm is None else float(grad_norm),
        zeros=None if zeros is None else float(zeros),
        updated=bool(updated),
        finite=True,
    )


def run_micro_batches(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    data: Iterator[MicroBatch],
    forward: ForwardStep,
    *,
    forward_only: bool,
) -> float:
    """Run megatron-core's schedule over the micro-batches of one iteration.

    An evaluation (`forward_only`) reads whole batches, also while --rampup-batch-size still makes those of training
    smaller, as in Megatron-LM.

    Returns:
        The mean loss of their tokens, over all data and context parallel ranks, on every rank.
    """
    forward.begin_iteration()
    whole = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    micro_batches = whole if forward_only else get_num_microbatches()
    reported = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=_for_each_chunk(data, len(model), micro_batches),
        model=model,
        num_microbatches=micro_batches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=forward_only,
    )
    return _mean_loss(reported)


def _for_each_chunk(
    data: Iterator[MicroBatch], chunks: int, micro_batches: int
) -> Iterator[MicroBatch] | list[Iterator[MicroBatch]]:
    """The coming iteration's micro-batches; of several model chunks each reads all of them, at its own pace."""
    if chunks == 1:
        return data
    return list(itertools.tee(itertools.islice(data, micro_batches), chunks))


def _mean_loss(reported: list[dict[str, torch.Tensor]]) -> float:
    """Sum and number of the tokens' losses, added over micro-batches and ranks; only the last stage has any."""
    sums = torch.zeros(2, dtype=torch.float32, device=torch.cuda.current_device())
    for each in reported:
        sums += each[LOSS]
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    total, count = sums.tolist()
    return float(total / count) if count else float("nan")


def _all_finite(loss: float, model: list[DistributedDataParallel]) -> bool:
    """Whether the loss and every gradient, on every rank, are numbers."""
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    sums = [buffer.grad_data.sum(dtype=torch.float32) for buffer in buffers]
    finite = torch.stack([torch.tensor(loss, device=torch.cuda.current_device()), *sums]).isfinite().all().int()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
