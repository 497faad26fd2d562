"""The whole state of training, held in host memory, so that the same steps can be trained again bit for bit.

What a step reads and another step has changed: parameters and buffers of the model, the float32 copies and moments of
the optimizer with its step counts and rates, the loss scale, the schedules, the counters, and every generator of random
numbers. A checkpoint would do as well, where there is room on the disk.

Gradients are not held: every step begins by clearing them. Samples are not either: reading begins anew at the sample
that the counters name.

Trade-off: host memory for one more copy of weights and optimizer state (of a fresh optimizer: of the weights alone).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.training.checkpoint.checkpointing import TrainingState
from megatron.training.checkpoint.optimizer_state import members
from megatron.training.checkpoint.rng_state import rng_state, set_rng_state
from megatron.training.model import unwrap


class StateSnapshot:
    """A copy of `state`, taken when this is made; `restore` puts it back, as often as one likes."""

    def __init__(self, state: TrainingState) -> None:
        inner = list(members(state.optimizer))
        live = {id(tensor): tensor for tensor in (*_of_model(state.model), *_of_groups(inner))}  # some are in both
        self._tensors = [(tensor, _on_host(tensor)) for tensor in live.values()]
        self._optimizers = [_OptimizerState(optimizer) for optimizer in inner]
        self._counters = [(each, _plain(each)) for each in (state.scheduler, state.progress) if each is not None]
        self._rng = rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back in place: who holds a parameter goes on holding it."""
        for tensor, held in self._tensors:
            tensor.data.copy_(held)
        for optimizer in self._optimizers:
            optimizer.restore()
        for owner, values in self._counters:
            vars(owner).update(values)
        set_rng_state(self._rng)


class _OptimizerState:
    """What one of torch's optimizers under Megatron's holds beside the parameters, and the loss scaler beside it."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._torch = optimizer.optimizer
        self._scaler = getattr(optimizer, "grad_scaler", None)
        self._scale = copy.deepcopy(self._scaler.state_dict()) if self._scaler is not None else {}
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self._torch.param_groups
        ]
        self._state = {
            parameter: {name: _held(value) for name, value in values.items()}
            for parameter, values in self._torch.state.items()
        }

    def restore(self) -> None:
        """Put it back; a moment that was not there yet is forgotten."""
        if self._scaler is not None:
            self._scaler.load_state_dict(copy.deepcopy(self._scale))
        for group, held in zip(self._torch.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(copy.deepcopy(held), params=parameters)
        self._torch.state.clear()
        for parameter, values in self._state.items():
            self._torch.state[parameter] = {name: _released(value) for name, value in values.items()}


def _of_model(model: list[Any]) -> Iterator[torch.Tensor]:
    for chunk in map(unwrap, model):
        yield from chunk.parameters()
        yield from chunk.buffers()


def _of_groups(optimizers: list[MegatronOptimizer]) -> Iterator[torch.Tensor]:
    """What is stepped: parameters of the model, or float32 copies of them."""
    for optimizer in optimizers:
        for group in optimizer.optimizer.param_groups:
            yield from group["params"]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _held(value: Any) -> Any:
    """A copy; of a tensor, with the device it belongs to."""
    return (_on_host(value), value.device) if torch.is_tensor(value) else copy.deepcopy(value)


def _released(held: Any) -> Any:
    return held[0].to(held[1], copy=True) if isinstance(held, tuple) else copy.deepcopy(held)


def _plain(owner: Any) -> dict[str, Any]:
    """The numbers and names among an object's attributes."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, int | float | str | bool | None)}
