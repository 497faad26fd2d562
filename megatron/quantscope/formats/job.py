"""What a backend is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.quantscope.formats.records import Format


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of `fake_quantize`, checked and with their defaults filled in.

    Attributes:
        fmt: The format.
        axis: Dimension along which blocks run, >= 0.
        scale_rule: `floor` or `rceil`, for E8M0 scales.
        saturate: Whether a magnitude beyond max becomes max.
        amax: Scalar tensor, the largest magnitude of the whole tensor, if x is a shard of it.
    """

    fmt: Format
    axis: int
    scale_rule: str
    saturate: bool
    amax: Tensor | None
