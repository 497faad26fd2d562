"""Attach probes to a built model: the one place where Megatron's modules meet formats and capture.

`instrument` walks the modules once, after the model is built and before it is wrapped or trained, and attaches a probe
to every linear and attention module that is to be quantised or kept, and hooks at the further points that were asked
for (`points`). What a kind of module is called in a capture, and how its tensors lie over the ranks, stands in the
table of `kinds`.
With neither a recipe nor a session nothing is attached, and training runs upstream's code alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron.core.extensions.te_kinds import te_kinds
from megatron.core.kinds import KINDS, Kind
from megatron.core.places import Place, places
from megatron.core.points import unwatch, watch
from megatron.core.probe import Probe, tensor_parallel_group
from megatron.core.shards import GATE_AND_UP, Axes, shards
from megatron.quantscope.capture import CaptureSession
from megatron.quantscope.formats.backends import prepare
from megatron.quantscope.gemm import QuantConfig

ALL_KINDS = KINDS | te_kinds()
GATED = "linear_fc1"  # the linear layer that a gated MLP makes twice as wide


def instrument(
    model_chunks: Iterable[torch.nn.Module],
    *,
    recipe: QuantConfig | None,
    session: CaptureSession | None,
    num_layers: int,
) -> int:
    """Attach a probe to every module that `recipe` quantises or `session` keeps, and hooks at the session's points.

    A second call replaces what the first attached to the same modules.

    Args:
        model_chunks: This rank's model, a chunk a virtual pipeline stage; wrapped (DDP, Float16Module) or bare.
        recipe: What is quantised how; None: nothing.
        session: What is kept; None: nothing.
        num_layers: Transformer layers of the whole model, over all pipeline stages.

    Returns:
        The number of modules that carry a probe or hooks.

    Raises:
        ValueError: for a kind of attention that can not be quantised.
    """
    names = session.config.points if session is not None else frozenset()
    attached = probed = 0
    for place in places(model_chunks):
        unwatch(place)
        kind = ALL_KINDS.get(type(place.module))
        has_probe = kind is not None and _attach(place, kind, recipe, session, num_layers)
        is_watched = session is not None and watch(place, names=names, session=session)
        probed += has_probe
        attached += has_probe or is_watched
    if probed:
        prepare()
    return attached


def _attach(
    place: Place, kind: Kind, recipe: QuantConfig | None, session: CaptureSession | None, num_layers: int
) -> bool:
    """Attach a probe to a module of a known kind; False where it is neither quantised nor kept."""
    quant = _quantised(place, kind, recipe, num_layers)
    site = _site(place, kind, quant, session)
    if quant is None and site is None:
        return False
    on_request = kind.on_request & session.config.points if session is not None else frozenset()
    place.module.attach_probe(Probe(quant, site, on_request))
    return True


def _quantised(place: Place, kind: Kind, recipe: QuantConfig | None, num_layers: int) -> Any:
    if recipe is None:
        return None
    resolve: Callable[[str, int | None, int], Any] = getattr(recipe, kind.quant)
    return resolve(place.name, place.layer_idx, num_layers)


def _site(place: Place, kind: Kind, quant: Any, session: CaptureSession | None) -> Any:
    """The place `place`'s tensors go, or None when nothing of it is kept."""
    if session is None:
        return None
    group = tensor_parallel_group(place.module)
    gathered = place.config.sequence_parallel and group.rank() > 0
    gated = place.last_name == GATED and place.config.gated_linear_unit
    is_expert = place.expert is not None
    axes = (Axes.of_expert if is_expert else Axes.of)(place.config, group)
    return session.site(
        module=place.name,
        layer_type=kind.layer_type,
        component=kind.component,
        layer_idx=place.layer_idx,
        formats=quant.formats() if quant is not None else {},
        shards=shards(kind.layout, axes, pieces=GATE_AND_UP if gated else 1),
        leave_out=kind.gathered if gathered else frozenset(),
        routed=is_expert,
        **kind.facts(place.module),
    )
