"""Upstream's unfused attention, and a probe that can be attached to one module of it.

Without a probe the class is upstream's. A probe with formats runs `quantscope.gemm.attention` in place of upstream's
forward; a probe without formats runs upstream's forward and watches it through gradient hooks on views of its operands,
so that `--quant-type none --save-tensors` computes what upstream computes, bit for bit.
"""

from megatron.core import _overlay

_overlay.module(globals())

import contextlib
import functools
from typing import Any

from megatron.core.probe import Probe, maximum_over
from megatron.quantscope.gemm import AttentionQuant, Tap
from megatron.quantscope.gemm.attention import attention

_upstream_forward = DotProductAttention.forward
_LARGEST_SEED = 2**63 - 1


def _probed_forward(
    module: torch.nn.Module,
    probe: Probe[AttentionQuant],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """Upstream's `forward` with its GEMMs quantised as the probe says and its tensors shown to the probe."""
    tap = probe.tap()
    if probe.quant is None:
        forward = _upstream_forward if tap is None else functools.partial(_watched_forward, tap=tap)
        return forward(module, query, key, value, attention_mask, **options)
    unsupported = [name for name in ("attention_bias", "packed_seq_params") if options.get(name) is not None]
    if unsupported:
        raise RuntimeError(f"quantised attention does not support {', '.join(unsupported)}; use --quant-scope linear")
    return attention(
        query,
        key,
        value,
        quant=probe.quant,
        softmax_scale=module.softmax_scale,
        causal=module.attn_mask_type == AttnMaskType.causal and attention_mask is None,
        mask=attention_mask,
        dropout=module.attention_dropout.p if module.training else 0.0,
        seed=functools.partial(_dropout_seed, module, query.device),
        softmax_in_fp32=module.config.attention_softmax_in_fp32,
        tap=tap,
        reduce_amax=maximum_over(module.tp_group),
    )


def _watched_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tap: Tap,
    **options: Any,
) -> Tensor:
    """Upstream's forward; operands, output and their gradients go to `tap`."""
    # A view has a gradient of its own: that of this use, whatever else the operand feeds.
    operands = {"query": query.view_as(query), "key": key.view_as(key), "value": value.view_as(value)}
    for name, tensor in operands.items():
        tap("forward", "pre", name, tensor)
    output = _upstream_forward(module, *operands.values(), attention_mask, **options)
    tap("forward", "post", "output", output)
    if output.requires_grad:
        output.register_hook(lambda grad: tap("backward", "pre", "grad_output", grad))
    for name, tensor in operands.items():
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(tap, "backward", "post", f"grad_{name}"))
    return output


def _dropout_seed(module: torch.nn.Module, device: torch.device) -> int:
    """One draw from the generator upstream's dropout would use here (forked unless sequence parallel)."""
    forked = not module.config.sequence_parallel
    with tensor_parallel.get_cuda_rng_tracker().fork() if forked else contextlib.nullcontext():
        return int(torch.randint(_LARGEST_SEED, (), device=device))


def _attach_probe(self: torch.nn.Module, probe: Probe[AttentionQuant]) -> None:
    """Quantise and watch this module as `probe` says; a second call replaces the first probe.

    Raises:
        ValueError: when it is to be quantised and uses a variant of attention that the quantised one does not have.
    """
    config = self.config
    softmax_type = getattr(config, "softmax_type", "vanilla")  # megatron-core 0.14 has only the plain one
    variants = {
        "a sliding window (window_size)": config.window_size is not None,
        f"softmax type {softmax_type!r}": softmax_type != "vanilla",
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
    }
    missing = [name for name, used in variants.items() if used]
    if probe.quant is not None and missing:
        raise ValueError(f"quantised attention does not support {', '.join(missing)}; use --quant-scope linear")
    self.forward = functools.partial(_probed_forward, self, probe)


DotProductAttention.attach_probe = _attach_probe
