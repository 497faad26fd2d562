"""Unquantised attention by a flash kernel: `--attention-backend flash` for the local layers.

A flash kernel never holds the scores of more than a tile, and no probabilities at all, so memory is linear in the
sequence and `attention_probs` can not be shown. It accumulates in float32, and computes what upstream's unfused
attention computes up to the order of its sums.

    on a GPU   the package flash-attn where it is installed, else torch's flash kernel; fp16 and bf16 only
    on a CPU   torch's flash kernel; every dtype, no dropout

Dropout draws from the generator that upstream's would draw from (forked unless sequence parallel). Under context
parallelism a rank holds two chunks of the sequence (`context_parallel`); each attends to the keys up to its end, so a
causal mask whose last row sees every key is all that is needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from megatron.core import tensor_parallel
from megatron.core.context_parallel import CHUNKS_A_RANK, chunks_of, gather_sequence
from megatron.core.probe import Probe
from megatron.core.transformer.attention_watch import watched
from megatron.core.transformer.dot_product_attention import DotProductAttention, head_facts
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.quantscope.gemm import AttentionQuant

PACKAGE = "flash_attn"


class FlashAttention(DotProductAttention):
    """`DotProductAttention` computed by a flash kernel: same arguments, same result [s, b, heads * d].

    Raises:
        ValueError: for a variant of attention that the kernel does not have.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        vars(self).pop("forward", None)  # that of unfused attention over a shared sequence
        softmax_type = getattr(config, "softmax_type", "vanilla")  # megatron-core 0.14 has only the plain one
        variants = {
            "a sliding window (window_size)": config.window_size is not None,
            f"softmax type {softmax_type!r}": softmax_type != "vanilla",
        }
        missing = [name for name, used in variants.items() if used]
        if missing:
            raise ValueError(f"flash attention does not support {', '.join(missing)}")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **options: Any
    ) -> Tensor:
        """Attention of `query` [s, b, heads, d] to `key` and `value` [s, b, groups, d].

        Raises:
            RuntimeError: for a mask other than the causal one, a bias, and packed sequences.
        """
        unsupported = [name for name in ("attention_bias", "packed_seq_params") if options.get(name) is not None]
        if attention_mask is not None:
            unsupported.append("attention_mask")
        if unsupported:
            raise RuntimeError(f"flash attention does not support {', '.join(unsupported)}")
        causal = self.attn_mask_type == AttnMaskType.causal
        attend = functools.partial(self._attend, causal=causal)
        if self.config.context_parallel_size == 1:
            context = attend(query, key, value)
        else:
            key, value = (gather_sequence(share, self.cp_group) for share in (key, value))
            length = query.size(0) // CHUNKS_A_RANK
            ends = [(chunk + 1) * length for chunk in chunks_of(self.cp_group.rank(), self.cp_group.size())]
            ends = ends if causal else [key.size(0)] * CHUNKS_A_RANK
            parts = zip(query.split(length), ends, strict=True)
            context = torch.cat([attend(part, key[:end], value[:end]) for part, end in parts])
        return context.flatten(-2)

    def attach_probe(self, probe: Probe[AttentionQuant]) -> None:
        """Watch this module as `probe` says; a second call replaces the first probe.

        Raises:
            ValueError: when it is to be quantised.
        """
        if probe.quant is not None:
            raise ValueError(
                "quantised attention runs its own kernel, and --attention-backend flash another; use auto, or "
                "--quant-scope linear"
            )
        self.forward = functools.partial(_probed_forward, self, probe)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """[s_q, b, heads, d]; with `causal` the last query sees every key, the one before it all but the last, ..."""
        kernel = _by_package if query.is_cuda and importlib.util.find_spec(PACKAGE) else _by_torch
        dropout = self.attention_dropout.p if self.training else 0.0
        forked = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forked else contextlib.nullcontext():
            return kernel(query, key, value, causal=causal, dropout=dropout, scale=head_facts(self)["softmax_scale"])


def _by_torch(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, dropout: float, scale: float) -> Tensor:
    """By torch's flash kernel; an error of its own where that can not take the operands."""
    heads, groups, square = query.size(2), key.size(2), query.size(0) == key.size(0)
    if not square and heads != groups:  # its mask for more keys than queries knows equal heads only
        key, value = (shared.repeat_interleave(heads // groups, dim=2) for shared in (key, value))
    operands = (operand.permute(1, 2, 0, 3) for operand in (query, key, value))  # [b, heads, s, d]
    mask = causal_lower_right(query.size(0), key.size(0)) if causal and not square else None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        context = scaled_dot_product_attention(
            *operands,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal and square,
            scale=scale,
            enable_gqa=square and heads != groups,
        )
    return context.permute(2, 0, 1, 3)


def _by_package(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, dropout: float, scale: float) -> Tensor:
    """By flash-attn, whose causal mask is aligned to the last query and key, and which shares heads by itself."""
    from flash_attn import flash_attn_func

    operands = (operand.transpose(0, 1) for operand in (query, key, value))  # [b, s, heads, d]
    options = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    context = flash_attn_func(*operands, dropout_p=dropout, softmax_scale=scale, causal=causal, **options)
    return context.transpose(0, 1)


def _probed_forward(
    module: FlashAttention,
    probe: Probe[AttentionQuant],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """The module's `forward`, with operands, output and their gradients shown to the probe."""
    tap, forward = probe.tap(), functools.partial(FlashAttention.forward, module)
    if tap is not None:
        forward = functools.partial(watched, forward, tap)
    return forward(query, key, value, *args, **options)
