"""Recomputation, and a tracker of random states that nothing here asks for."""

import contextlib

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast


def checkpoint(
    function, *args, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None, **options
):
    assert not distribute_saved_activations
    was_enabled = FP8GlobalStateManager.enabled

    def run(*inputs):
        with fp8_autocast(enabled=was_enabled, fp8_recipe=FP8GlobalStateManager.recipe):
            return function(*inputs, **options)

    return torch_checkpoint(run, *args, use_reentrant=True)


class CudaRNGStatesTracker:
    def __init__(self):
        self.reset()

    def reset(self):
        self.states_ = {}


def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    return contextlib.nullcontext()


def gather(tensor, group):
    """[s / n, ...] of each of n ranks -> [s, ...]."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def reduced(tensor, group):
    """The sum over the ranks."""
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def scattered(tensor, group):
    """The sum over the ranks, and of that this rank's slice."""
    return reduced(tensor, group).chunk(group.size())[group.rank()].clone()
