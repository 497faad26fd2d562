"""The modules of this rank's part of a model, by the names and layer numbers they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Place:
    """One module and where it stands.

    Attributes:
        name: Full name without wrappers, with the whole model's numbers of layers and of experts:
            `decoder.layers.3.mlp.linear_fc1`, `decoder.layers.3.mlp.experts.local_experts.5.linear_fc1`.
        layer_idx: Global layer from 0; None for a module outside the layers.
        expert: Global number, from 0, of the expert that the module is or belongs to; None: it is in none.
        module: The module itself.
        config: TransformerConfig of the model (a module's own may be a copy that is settled otherwise).
    """

    name: str
    layer_idx: int | None
    expert: int | None = None
    module: torch.nn.Module
    config: Any

    @property
    def last_name(self) -> str:
        """What the module's parent calls it."""
        return self.name.rpartition(".")[2]


def places(model_chunks: Iterable[torch.nn.Module]) -> Iterator[Place]:
    """Every module of the chunks, wrapped (DDP, Float16Module) or bare."""
    for chunk in model_chunks:
        while isinstance(getattr(chunk, "module", None), torch.nn.Module):  # DDP and Float16Module
            chunk = chunk.module
        experts = _experts(chunk)
        layers = {name: module.layer_number - 1 for name, module in chunk.named_modules() if _is_layer(name, module)}
        numbers = {**layers, **experts}
        for name, module in chunk.named_modules():
            yield Place(
                name=_global_name(name, numbers),
                layer_idx=_number_of(name, layers),
                expert=_number_of(name, experts),
                module=module,
                config=chunk.config,
            )


def _is_layer(name: str, module: torch.nn.Module) -> bool:
    """True for `decoder.layers.3`: a member of a numbered list that knows its place in the whole model."""
    return name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number")


def _experts(chunk: torch.nn.Module) -> dict[str, int]:
    """Local name of every routed expert of this rank -> its number in the whole mixture."""
    mixtures = ((name, module) for name, module in chunk.named_modules() if hasattr(module, "local_expert_indices"))
    return {
        f"{name}.experts.local_experts.{local}": number
        for name, mixture in mixtures
        for local, number in enumerate(mixture.local_expert_indices)
    }


def _outer_names(name: str) -> Iterator[str]:
    """`decoder`, `decoder.layers`, `decoder.layers.3`: the module's ancestors, outermost first, and itself."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _number_of(name: str, numbers: Mapping[str, int]) -> int | None:
    """The number of the first of `numbers` that the module is or lies in."""
    return next((numbers[outer] for outer in _outer_names(name) if outer in numbers), None)


def _global_name(name: str, numbers: Mapping[str, int]) -> str:
    """`name` with the numbers that parts of it have on this rank replaced by the whole model's."""
    return ".".join(str(numbers.get(outer, outer.rpartition(".")[2])) for outer in _outer_names(name))
