"""A recipe against the whole model: what every module of every rank becomes, and whether the recipe fits it.

A rank holds the layers of its pipeline stage and its share of the experts, so only all together can tell that a
pattern of a recipe file matches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.instrumentation import ALL_KINDS
from megatron.core.places import places
from megatron.quantscope.gemm import QuantConfig
from megatron.quantscope.gemm.module_rules import Hit
from megatron.quantscope.gemm.resolved import ResolvedModule

_Found = tuple[ResolvedModule, Hit | None]


def resolve(recipe: QuantConfig, model_chunks: Iterable[torch.nn.Module], num_layers: int) -> list[ResolvedModule]:
    """Every module with a GEMM of all ranks, by layer, those outside the layers last (collective).

    Args:
        recipe: What is quantised how.
        model_chunks: This rank's model, wrapped or bare.
        num_layers: Transformer layers of the whole model, over all pipeline stages.

    Raises:
        ValueError: a recipe file names a layer that there is not, or has a pattern that no module matches first, or
            every layer is skipped; on all ranks alike.
    """
    recipe.require_layers(num_layers)
    here: list[_Found] = []
    for place in places(model_chunks):
        kind = ALL_KINDS.get(type(place.module))
        if kind is None:
            continue
        quant: Any = getattr(recipe, kind.quant)(place.name, place.layer_idx, num_layers)
        formats = None if quant is None else quant.formats()
        module = ResolvedModule(name=place.name, layer_idx=place.layer_idx, formats=formats)
        here.append((module, recipe.match(place.name, place.layer_idx, num_layers)))
    found = {module.name: (module, hit) for of_rank in _of_all_ranks(here) for module, hit in of_rank}
    if recipe.rules is not None:
        recipe.rules.require_matched({hit for _, hit in found.values() if hit is not None}, list(found))
    return sorted((module for module, _ in found.values()), key=_layer)


def _of_all_ranks(ours: list[_Found]) -> list[list[_Found]]:
    if not dist.is_initialized():
        return [ours]
    everyone = [ours] * dist.get_world_size()
    dist.all_gather_object(everyone, ours)
    return everyone


def _layer(module: ResolvedModule) -> float:
    return math.inf if module.layer_idx is None else module.layer_idx
