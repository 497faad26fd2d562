"""Upstream's random states and activation checkpointing, whose functions remember the moment of their first call.

Activation recomputation calls one function twice, and upstream has two doors to it: `checkpoint(function, ...)` for
layers, core attention and the MLP, and `CheckpointWithoutOutput.checkpoint(run_function, ...)` for norms. What goes
through either is wrapped by `quantscope.capture.recompute.remembering`, which is the function itself where no capture
session runs. Everybody sees these: `tensor_parallel/__init__.py` re-exports this module's `checkpoint`, upstream calls
it as `tensor_parallel.checkpoint`, and the class is upstream's own with one method replaced.

megatron-core 0.14 to 0.19 have both doors. Without the second one (it is looked up, not required) norms could not be
recomputed at all. A third one would show a forward twice under one set of coordinates, which the sink refuses.
TransformerEngine's own checkpointing (fp8) has a door of its own, wrapped in `extensions.transformer_engine`.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import _overlay
from megatron.quantscope.capture.recompute import remembering

_overlay.module(globals())

_upstream_checkpoint: Callable[..., Any] = globals()["checkpoint"]
_WithoutOutput: Any = globals().get("CheckpointWithoutOutput")


@functools.wraps(_upstream_checkpoint)
def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Upstream's `checkpoint` of a function that remembers when it was first called."""
    return _upstream_checkpoint(remembering(function), *args, **options)


def _remembering_method(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the method of `CheckpointWithoutOutput`."""

    @functools.wraps(upstream)
    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return upstream(self, remembering(run_function), *args, **options)

    return checkpoint


if _WithoutOutput is not None:
    _WithoutOutput.checkpoint = _remembering_method(_WithoutOutput.checkpoint)
