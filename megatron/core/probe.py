"""What a quantised or watched module carries: the formats of its GEMMs and the place its tensors go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from megatron.core import parallel_state
from megatron.quantscope.capture import Site
from megatron.quantscope.gemm import AttentionQuant, LinearQuant, Tap

Quant = TypeVar("Quant", LinearQuant, AttentionQuant)
ATTENTION_PROBS = "attention_probs"  # a tensor that is shown on request only, and the name of the request


@dataclass(frozen=True)
class Probe(Generic[Quant]):
    """The two things a module can carry, each of them optional.

    Attributes:
        quant: Formats of the module's GEMM operands; None: upstream's own path.
        site: Where the module's tensors are kept; None: they are not.
        on_request: Names of tensors that are shown only because they were asked for.
    """

    quant: Quant | None
    site: Site | None
    on_request: frozenset[str] = frozenset()

    def tap(self) -> Tap | None:
        """A tap bound to the running iteration and micro-batch, or None when nothing is to be kept now."""
        return self.site.tap() if self.site is not None else None

    def shows(self, operation: str, phase: str, name: str) -> Callable[[torch.Tensor], None] | None:
        """What is to be called with a tensor that is shown on request only, or None when it is not to be made now."""
        tap = self.tap() if name in self.on_request else None
        return partial(tap, operation, phase, name) if tap is not None else None


def tensor_parallel_group(module: torch.nn.Module) -> torch.distributed.ProcessGroup:
    """The group that `module` is split over; attention and MLPs have none of their own before megatron-core 0.16."""
    group = getattr(getattr(module, "linear_fc1", module), "tp_group", None)
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


def maximum_over_shards(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The maximum of a scalar over all ranks that hold shards of `module`'s operands; None where one rank holds all.

    These are its tensor parallel group, and the context parallel ranks that share the sequences. An expert's GEMM is of
    the tokens that came to this rank alone, and there may be none of them: its weights' group is all there is.
    """
    shared = module.config.context_parallel_size > 1 and not getattr(module, "is_expert", False)
    group = parallel_state.get_tensor_and_context_parallel_group() if shared else tensor_parallel_group(module)
    if group.size() == 1:
        return None

    def reduce_amax(amax: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        return amax

    return reduce_amax
