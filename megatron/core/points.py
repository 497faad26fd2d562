"""Further places whose tensors can be kept (`--tensor-points`): the stream between the layers, norms, activations ...

A `Point` says how its modules are found, what its rows are called, how its tensors lie over ranks, and which hooks show
them; `watch` walks the table. Nothing is attached for a point that was not asked for. Several records may share a name.

    residual         the stream that enters each layer, and leaves the last; its gradient where it leaves a layer
    norm             input, output and the output's gradient of each norm
    activation       what enters the MLP's activation function: the output of linear_fc1 plus its bias
    logits           the output of the head, and its gradient
    attention_probs  what the softmax gives, before dropout, in the compute dtype: [b, heads, queries, keys]

What is attached are forward hooks of one module and hooks of tensors, and both return None. A forward hook that returns
nothing leaves the module's result alone, and a hook of a tensor that returns nothing leaves its gradient alone: it is
called with the sum of what all uses of the tensor gave, and no node joins the graph. `register_full_backward_hook`
does not keep that promise: it passes inputs and outputs through an autograd node of its own, which makes views of them.

The gradient of a tensor is shown by the forward that autograd runs through, so activation recomputation needs no rule
of its own: its first forward runs without gradients and shows the tensors, the second one shows the gradients.

Quantised attention has no softmax module and never holds a whole p; it collects the blocks itself (`Probe`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from megatron.core.places import Place
from megatron.core.probe import ATTENTION_PROBS, tensor_parallel_group
from megatron.core.shards import GATE_AND_UP, Axes, Layout, features, shards, slices, tokens
from megatron.core.transformer.dot_product_attention import DotProductAttention, head_facts
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.quantscope.capture import CaptureSession, Site

Hook = Callable[[torch.nn.Module, Site], RemovableHandle]


def shows_input(module: torch.nn.Module, site: Site) -> RemovableHandle:
    """Show the first argument of every forward of `module`."""

    def show(_: torch.nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        tap = site.tap()
        if tap is not None:
            tap("forward", "pre", "input", args[0] if args else options["hidden_states"])

    return module.register_forward_pre_hook(show, with_kwargs=True)


def shows_output(module: torch.nn.Module, site: Site) -> RemovableHandle:
    """Show the result of every forward of `module`."""

    def show(_: torch.nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tap = site.tap()
        if tap is not None:
            tap("forward", "post", "output", _first(result))

    return module.register_forward_hook(show)


def shows_gradient(module: torch.nn.Module, site: Site) -> RemovableHandle:
    """Show the gradient of the result of every forward of `module`, with the forward's coordinates."""

    def show(_: torch.nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tap, output = site.tap(), _first(result)
        if tap is not None and output.requires_grad:
            output.register_hook(functools.partial(tap, "backward", "pre", "grad_output"))

    return module.register_forward_hook(show)


def shows_activation_input(mlp: torch.nn.Module, site: Site) -> RemovableHandle:
    """Show what enters the activation function of every forward of `mlp`; it is no module, and often fused."""

    def show(_: torch.nn.Module, args: tuple[Any, ...], result: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        tap, (output, bias) = site.tap(), result
        if tap is not None:
            tap("forward", "pre", "input", output if bias is None else output.detach() + bias.detach())

    return mlp.linear_fc1.register_forward_hook(show)


def shows_probabilities(attention: torch.nn.Module, site: Site) -> RemovableHandle:
    """Show what the softmax of every forward of upstream's unfused `attention` gives."""

    def show(_: torch.nn.Module, args: tuple[Any, ...], probabilities: torch.Tensor) -> None:
        tap = site.tap()
        if tap is not None:
            tap("forward", "post", ATTENTION_PROBS, probabilities)

    return attention.scale_mask_softmax.register_forward_hook(show)


def _first(result: Any) -> torch.Tensor:
    """The tensor of a module's result: layers and linears return it with a companion."""
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


@dataclass(frozen=True, kw_only=True)
class Point:
    """One record of the table.

    Attributes:
        name: What `--tensor-points` calls it.
        finds: Whether a place is one of its.
        layer_type: Part of a captured tensor's name.
        component: Part of a captured tensor's name.
        hooks: What shows the tensors.
        layout: How they lie over ranks.
        gated: Whether the dimension of features is that of gate and up in a gated MLP.
        facts: What its modules say of themselves: further arguments of `CaptureSession.site`.
    """

    name: str
    finds: Callable[[Place], bool]
    layer_type: str
    component: str
    hooks: tuple[Hook, ...]
    layout: Layout
    gated: bool = False
    facts: Callable[[torch.nn.Module], dict[str, Any]] = lambda _: {}


def _is_layer(place: Place) -> bool:
    return isinstance(place.module, TransformerLayer)


def _is_last_layer(place: Place) -> bool:
    return _is_layer(place) and place.module.layer_number == place.config.num_layers


def _is_called(*names: str) -> Callable[[Place], bool]:
    """Finds modules by what their parents call them, bar the placeholders of norms that a layer does without."""
    return lambda place: place.last_name in names and not isinstance(place.module, IdentityOp)


def _is_a(kind: type[torch.nn.Module]) -> Callable[[Place], bool]:
    return lambda place: isinstance(place.module, kind)


def _alike(*splits: Any) -> Layout:
    return dict.fromkeys(("input", "output", "grad_output"), splits)


_STREAM = {"name": "residual", "layer_type": "residual", "component": "stream", "layout": _alike(slices(0), tokens(0))}
_NORM = {
    "name": "norm",
    "layer_type": "norm",
    "component": "norm",
    "hooks": (shows_input, shows_output, shows_gradient),
}

POINTS: tuple[Point, ...] = (
    Point(finds=_is_layer, hooks=(shows_input, shows_gradient), **_STREAM),
    Point(finds=_is_last_layer, hooks=(shows_output,), **_STREAM),  # what leaves the others enters the next
    Point(
        finds=_is_called("input_layernorm", "pre_mlp_layernorm", "final_layernorm"),
        layout=_alike(slices(0), tokens(0)),
        **_NORM,
    ),
    Point(
        finds=_is_called("q_layernorm", "k_layernorm"),  # [s, b, heads, d], the sequence gathered
        layout=_alike(features(2), tokens(0)),
        **_NORM,
    ),
    Point(
        name="activation",
        finds=_is_a(MLP),
        layer_type="activation",
        component="mlp",
        hooks=(shows_activation_input,),
        layout=_alike(features(-1), tokens(0)),
        gated=True,
    ),
    Point(
        name="logits",
        finds=_is_called("output_layer"),
        layer_type="logits",
        component="head",
        hooks=(shows_output, shows_gradient),
        layout=_alike(features(-1), tokens(0)),
    ),
    Point(
        name=ATTENTION_PROBS,
        finds=_is_a(DotProductAttention),
        layer_type="attention",
        component="FA",
        hooks=(shows_probabilities,),
        layout={ATTENTION_PROBS: (features(1), tokens(2))},
        facts=head_facts,
    ),
)

_ATTACHED: WeakKeyDictionary[torch.nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


def watch(place: Place, *, names: Collection[str], session: CaptureSession) -> bool:
    """Attach the hooks of the points in `names` to `place`.

    Args:
        place: A module of the model.
        names: The points that were asked for.
        session: Where the tensors go; its filter may leave the place out.

    Returns:
        Whether anything was attached.
    """
    handles: list[RemovableHandle] = []
    is_expert = place.expert is not None
    axes = (Axes.of_expert if is_expert else Axes.of)(place.config, tensor_parallel_group(place.module))
    for point in POINTS:
        if point.name not in names or not point.finds(place):
            continue
        site = session.site(
            module=place.name,
            layer_type=point.layer_type,
            component=point.component,
            layer_idx=place.layer_idx,
            formats={},
            shards=shards(point.layout, axes, pieces=_pieces(point, place)),
            routed=is_expert,
            **point.facts(place.module),
        )
        if site is not None:
            handles += [hook(place.module, site) for hook in point.hooks]
    if handles:
        _ATTACHED[place.module] = handles
    return bool(handles)


def unwatch(place: Place) -> None:
    """Take off what `watch` attached to `place`."""
    for handle in _ATTACHED.pop(place.module, ()):
        handle.remove()


def _pieces(point: Point, place: Place) -> int:
    return GATE_AND_UP if point.gated and place.config.gated_linear_unit else 1
