"""LayerNorm and RMSNorm in plain torch, with what megatron-core's own wrapper of them refuses.

Upstream's wrapper asserts away sequence parallelism and zero-centred weights. Both are small: under sequence
parallelism each rank sees part of the sequence, so the weights must be marked for megatron-core to add their gradients
over the ranks; a zero-centred norm (`--apply-layernorm-1p`) multiplies by 1 + weight and starts at weight 0.
With neither, these are torch's norms, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from megatron.core.transformer import TransformerConfig


class LayerNorm(torch.nn.LayerNorm):
    """y = (x - mean) / sqrt(variance + eps) * (offset + weight) + bias over the last dimension."""

    offset = 0.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden]; the result has the input's shape and dtype."""
        weight = self.weight + self.offset if self.offset else self.weight
        return functional.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension."""

    offset = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden]; the result has the input's shape and dtype."""
        weight = self.weight + self.offset if self.offset else self.weight
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class Norm:
    """Builds the norm that a TransformerConfig names; a class, since layer specifications take no functions here."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        """A norm over `hidden_size` elements.

        Args:
            config: Says which norm, whether zero-centred, and whether sequence parallel.
            hidden_size: Elements of the last dimension.
            eps: Added to the mean of squares.
        """
        norm = NORMS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        if config.layernorm_zero_centered_gamma:
            norm.offset = 1.0
            torch.nn.init.zeros_(norm.weight)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
