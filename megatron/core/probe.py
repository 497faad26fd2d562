"""What a quantised or watched module carries: the formats of its GEMMs and the place its tensors go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megatron.quantscope.capture import Site
from megatron.quantscope.gemm import AttentionQuant, LinearQuant, Tap

Quant = TypeVar("Quant", LinearQuant, AttentionQuant)


@dataclass(frozen=True)
class Probe(Generic[Quant]):
    """The two things a module can carry, each of them optional.

    Attributes:
        quant: Formats of the module's GEMM operands; None: upstream's own path.
        site: Where the module's tensors are kept; None: they are not.
    """

    quant: Quant | None
    site: Site | None

    def tap(self) -> Tap | None:
        """A tap bound to the running iteration and micro-batch, or None when nothing is to be kept now."""
        return self.site.tap() if self.site is not None else None


def maximum_over(group: torch.distributed.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The maximum of a scalar over `group`, for operands that are shards over it; None where the group is one rank."""
    if group.size() == 1:
        return None

    def reduce_amax(amax: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        return amax

    return reduce_amax
