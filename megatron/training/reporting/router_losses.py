"""The losses that keep a mixture's router balanced: mean over the layers with experts, micro-batches and ranks.

They are no part of `lm loss`: megatron-core adds their gradients in backward, and notes their values, without their
coefficients, where they are computed. Here they are read and set back to 0 once an iteration. Evaluation and the first
pass of activation recomputation leave no note.

megatron-core averages its notes over too few ranks, and each version over others: the z-loss is left at one rank's in
0.16, and at one tensor parallel rank's in 0.14 and 0.15, though under sequence parallelism each has its own tokens. A
mean over all ranks that share the router is right after any of them: of equal values it is the same again.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import track_moe_metrics

# Kind of balancing loss -> what megatron-core calls its note.
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
_Z_LOSS = "z_loss"


def names_of(args: argparse.Namespace) -> list[str]:
    """The losses that the flags ask for; [] without experts."""
    if args.num_experts is None:
        return []
    kinds, weights = _as_list(args.moe_router_load_balancing_type), _as_list(args.moe_aux_loss_coeff)
    balancing = [_NAMES[kind] for kind, weight in zip(kinds, weights, strict=False) if kind in _NAMES and weight]
    return balancing + [_Z_LOSS] * bool(args.moe_z_loss_coeff)


def router_losses(args: argparse.Namespace, micro_batches: int) -> dict[str, float]:
    """What the iteration's losses of the router came to (collective).

    Args:
        args: The flags.
        micro_batches: Forward passes of the iteration on each rank.
    """
    names, found = names_of(args), dict[str, torch.Tensor]()
    if names:
        track_moe_metrics(
            loss_scale=1 / micro_batches,
            iteration=0,  # for a writer, and there is none
            writer=None,
            total_loss_dict=found,
            force_initialize=True,  # also on a pipeline stage without experts
            track_names=names,
            num_layers=args.num_layers,
            moe_layer_freq=args.moe_layer_freq,
        )
    return _mean_over_ranks({name: found[name] for name in names})


def _mean_over_ranks(found: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the ranks with the same layers: all of them have as many tokens of an iteration."""
    if not found:
        return {}
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    sums = torch.stack(list(found.values()))
    dist.all_reduce(sums, group=group)
    return dict(zip(found, (sums / group.size()).tolist(), strict=True))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
