"""The modules of this rank's part of a model, by the names and layer numbers they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Place:
    """One module and where it stands.

    Attributes:
        name: Full name without wrappers, with global layer numbers: `decoder.layers.3.mlp.linear_fc1`.
        layer_idx: Global layer from 0; None for a module outside the layers.
        module: The module itself.
        config: TransformerConfig of the model (a module's own may be a copy that is settled otherwise).
    """

    name: str
    layer_idx: int | None
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
        layers = {name: module.layer_number - 1 for name, module in chunk.named_modules() if _is_layer(name, module)}
        for name, module in chunk.named_modules():
            local = next((layer for layer in layers if f"{name}.".startswith(f"{layer}.")), None)
            layer_idx = None if local is None else layers[local]
            global_name = _global_name(name, local, layer_idx)
            yield Place(name=global_name, layer_idx=layer_idx, module=module, config=chunk.config)


def _is_layer(name: str, module: torch.nn.Module) -> bool:
    """True for `decoder.layers.3`: a member of a numbered list that knows its place in the whole model."""
    return name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number")


def _global_name(name: str, local: str | None, layer_idx: int | None) -> str:
    """`name` with this stage's layer number replaced by the whole model's."""
    if local is None:
        return name
    return f"{local.rpartition('.')[0]}.{layer_idx}{name[len(local) :]}"
