"""Attach probes to a built model: the one place where Megatron's modules meet formats and capture.

`instrument` walks the modules once, after the model is built and before it is wrapped or trained, and attaches a probe
to every linear and attention module that is to be quantised or kept. What a kind of module is called in a capture, and
how its tensors are split over the tensor-parallel group, stands in the table `KINDS`; nothing else branches on a class.
With neither a recipe nor a session nothing is attached, and training runs upstream's code alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.probe import Probe
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.quantscope.capture import CaptureSession
from megatron.quantscope.formats.backends import prepare
from megatron.quantscope.gemm import QuantConfig

PARTIAL = "partial"  # one rank's summand, before the reduction over the tensor-parallel group


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How the modules of one class are quantised and kept.

    Attributes:
        layer_type: Part of a captured tensor's name.
        component: Part of a captured tensor's name.
        quant: Name of the QuantConfig method that says how such a module is quantised.
        split: Tensor name -> dimension that is split over the tensor-parallel group.
        partial: Tensors that are one rank's summand of the true value.
        gathered: Tensors that every rank of the group holds alike under sequence parallelism, since it was gathered for
            the GEMM: kept by the group's first rank only.
    """

    layer_type: str
    component: str
    quant: str
    split: dict[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()


_HEADS, _HIDDEN = 2, -1  # dimensions of q, k, v [s, b, heads, d] and of [s, b, hidden]
_LINEAR = {"layer_type": "linear", "component": "linear", "quant": "linear"}

KINDS: dict[type[torch.nn.Module], Kind] = {
    ColumnParallelLinear: Kind(
        **_LINEAR,
        split={"weight": 0, "output": _HIDDEN, "grad_output": _HIDDEN, "grad_weight": 0},
        partial=frozenset({"grad_input"}),
        gathered=frozenset({"input"}),
    ),
    RowParallelLinear: Kind(
        **_LINEAR,
        split={"weight": 1, "input": _HIDDEN, "grad_input": _HIDDEN, "grad_weight": 1},
        partial=frozenset({"output"}),
        gathered=frozenset({"grad_output"}),
    ),
    DotProductAttention: Kind(
        layer_type="attention",
        component="FA",
        quant="attention",
        split={
            **dict.fromkeys(("query", "key", "value", "grad_query", "grad_key", "grad_value"), _HEADS),
            "output": _HIDDEN,
            "grad_output": _HIDDEN,
        },
    ),
}


@dataclass(frozen=True)
class Target:
    """One module that can carry a probe: its global name, its global layer from 0, and its kind."""

    name: str
    layer_idx: int | None
    module: torch.nn.Module
    kind: Kind


def instrument(
    model_chunks: Iterable[torch.nn.Module],
    *,
    recipe: QuantConfig | None,
    session: CaptureSession | None,
    num_layers: int,
) -> int:
    """Attach a probe to every module that `recipe` quantises or `session` keeps.

    Args:
        model_chunks: This rank's model, a chunk a virtual pipeline stage; wrapped (DDP, Float16Module) or bare.
        recipe: What is quantised how; None: nothing.
        session: What is kept; None: nothing.
        num_layers: Transformer layers of the whole model, over all pipeline stages.

    Returns:
        The number of modules that carry a probe.

    Raises:
        ValueError: for activation recomputation together with a session, and for a kind of attention that can not be
            quantised.
    """
    attached = 0
    for target in _targets(model_chunks):
        quant = _quantised(target, recipe, num_layers)
        site = _site(target, quant, session)
        if quant is not None or site is not None:
            target.module.attach_probe(Probe(quant, site))
            attached += 1
    if attached:
        prepare()
    return attached


def _targets(model_chunks: Iterable[torch.nn.Module]) -> Iterator[Target]:
    """Every module of a known kind, with the name and layer it has in the whole model."""
    for chunk in model_chunks:
        while isinstance(getattr(chunk, "module", None), torch.nn.Module):  # DDP and Float16Module
            chunk = chunk.module
        layers = {name: module.layer_number - 1 for name, module in chunk.named_modules() if _is_layer(name, module)}
        for name, module in chunk.named_modules():
            kind = KINDS.get(type(module))
            if kind is not None:
                local = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
                layer_idx = None if local is None else layers[local]
                yield Target(_global_name(name, local, layer_idx), layer_idx, module, kind)


def _is_layer(name: str, module: torch.nn.Module) -> bool:
    """True for `decoder.layers.3`: a member of a numbered list that knows its place in the whole model."""
    return name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number")


def _global_name(name: str, local: str | None, layer_idx: int | None) -> str:
    """`name` with this stage's layer number replaced by the whole model's."""
    if local is None:
        return name
    return f"{local.rpartition('.')[0]}.{layer_idx}{name[len(local) :]}"


def _quantised(target: Target, recipe: QuantConfig | None, num_layers: int) -> Any:
    if recipe is None:
        return None
    resolve: Callable[[int | None, int], Any] = getattr(recipe, target.kind.quant)
    return resolve(target.layer_idx, num_layers)


def _site(target: Target, quant: Any, session: CaptureSession | None) -> Any:
    """The place `target`'s tensors go, or None when nothing of it is kept."""
    if session is None:
        return None
    config, kind = target.module.config, target.kind
    if config.recompute_granularity is not None:
        raise ValueError(
            f"recompute_granularity {config.recompute_granularity!r} runs a forward twice and can not be combined with "
            "--save-tensors yet; leave one of them out"
        )
    group = target.module.tp_group
    gathered = config.sequence_parallel and group.rank() > 0
    return session.site(
        module=target.name,
        layer_type=kind.layer_type,
        component=kind.component,
        layer_idx=target.layer_idx,
        formats=quant.formats() if quant is not None else {},
        shards={name: {"dim": dim, "over": "tp"} for name, dim in kind.split.items() if group.size() > 1},
        stages={name: PARTIAL for name in kind.partial if group.size() > 1},
        leave_out=kind.gathered if gathered else frozenset(),
    )
