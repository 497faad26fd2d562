"""The state of torch's optimizers under Megatron's, made fit for checkpoints.

On a machine without Apex and TransformerEngine megatron-core steps with torch's own Adam, whose state differs from
theirs in two ways. Both lose the number of steps done, on which the bias correction of the moments depends:

* it has no state before the first step, so there is nothing for a checkpoint to be loaded into, and nothing to save
  from a run whose steps were all left out (`complete_state` makes what the first step would make, and `restore_state`
  knows that a count of 0 is not stored);
* it counts the steps for each parameter, in a tensor. megatron-core's distributed optimizer gives all parameters one
  tensor when it loads, which every step then increases once for each of them; beside that it copies the count from
  before loading over the loaded one, or stops where a checkpoint has none for a parameter (`ExactStepCounts`).

The loss of the step after such a load is right, and each later one wrong by a little. So it is where groups of
parameters are told apart by less than what makes them differ: --decoupled-lr gives two groups that upstream takes for
one another, with each other's learning rate. The groups of a checkpoint that is loaded where it was written stand in
the same order, so their places tell (`restore_state`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_STEP = "step"
_COMMON_STEP = "common_step"  # where upstream's plain optimizers store it; they leave it out when it is 0
_COUNTS_BY_PARAMETER = (torch.optim.Adam, torch.optim.AdamW)
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")  # of a group, to upstream


class ExactStepCounts(DistributedOptimizer):  # type: ignore[misc]
    """The distributed optimizer over torch's Adam, with every parameter's own count of steps; see `prepare`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As upstream, and no parameter shares its count with another."""
        super().load_state_dict(state_dict)
        for values in self.optimizer.state.values():
            values[_STEP] = values[_STEP].clone()

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        """As upstream without the count, which is stored with the groups and has not a tensor's shape."""
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        return {name: tensor for name, tensor in tensors.items() if name != _STEP}

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """As upstream, but the count is the one that was loaded with the groups before the tensors are."""
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        super()._set_main_param_and_optimizer_states(
            model_param, {**tensors, _STEP: self.optimizer.state[parameter][_STEP]}
        )


def prepare(optimizer: MegatronOptimizer) -> None:
    """Make the optimizers in `optimizer` fit for checkpoints, where torch's own step under them."""
    for member in members(optimizer):
        if type(member) is DistributedOptimizer and isinstance(member.optimizer, _COUNTS_BY_PARAMETER):
            member.__class__ = ExactStepCounts
        if member.init_state_fn is None:  # upstream calls it all the same
            member.init_state_fn = _leave


def complete_state(optimizer: MegatronOptimizer) -> None:
    """Give each parameter that torch has not stepped yet the state from which its first step begins."""
    for member in members(optimizer):
        for group in member.optimizer.param_groups:
            names = _moments(member.optimizer, group)
            for parameter in group["params"] if names else ():
                values = member.optimizer.state[parameter]
                for name in names:
                    if values.get(name) is None:
                        values[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if isinstance(member.optimizer, _COUNTS_BY_PARAMETER):
                    values.setdefault(_STEP, torch.tensor(0.0, dtype=torch.float32))  # on the CPU, as torch keeps it


@torch.no_grad()  # which not all of upstream's ways of loading think of
def restore_state(optimizer: MegatronOptimizer, stored: dict[Any, Any]) -> None:
    """Load what a checkpoint holds of the optimizer's state, after `complete_state`."""
    if any(isinstance(member.optimizer, _COUNTS_BY_PARAMETER) for member in members(optimizer)):
        for part in _torch_states(stored):
            if "state" in part:
                part["state"].setdefault(_COMMON_STEP, torch.tensor(0.0, dtype=torch.float32))
    groups = [[dict(group) for group in part["param_groups"]] for part in _torch_states(stored)]
    in_place = [
        (member, theirs)
        for member, theirs in zip(members(optimizer), groups, strict=False)
        if list(map(_identity, member.optimizer.param_groups)) == list(map(_identity, theirs))
    ]
    for member, _ in in_place:
        member._filter_and_reorder_param_groups = lambda ours, theirs: theirs
    optimizer.load_state_dict(stored)
    for member, theirs in in_place:
        for group, values in zip(member.optimizer.param_groups, theirs, strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})


def members(optimizer: MegatronOptimizer | None) -> Iterator[MegatronOptimizer]:
    """The members of a chain that optimise anything; a rank may have none."""
    chain = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    return (member for member in chain if not getattr(member, "is_stub_optimizer", False))


def _identity(group: dict[str, Any]) -> list[Any]:
    return [group.get(name) for name in _IDENTITY]


def _torch_states(stored: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The state dictionaries of torch's optimizers within a Megatron optimizer's, in the order of the chain."""
    if "param_groups" in stored:
        yield stored
        return
    for _, part in sorted(stored.items(), key=lambda item: str(item[0])):
        if isinstance(part, dict):
            yield from _torch_states(part)


def _moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """Names of what torch keeps for each parameter beside a count of steps; (): another's optimizer."""
    if isinstance(optimizer, _COUNTS_BY_PARAMETER):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if isinstance(optimizer, torch.optim.SGD) and group["momentum"] else ()


def _leave(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Make no state: `complete_state` has."""
