"""Upstream's unfused attention, context parallelism for it, and a probe that can be attached to one module of it.

Without a probe and on one context parallel rank the class is upstream's. A probe with formats runs
`quantscope.gemm.attention` in place of upstream's forward; a probe without formats runs upstream's forward and watches
it through gradient hooks on views of its operands, so that `--quant-type none --save-tensors` computes what upstream
computes, bit for bit.

Upstream's class refuses context parallelism. Here every rank gathers the keys and values of the whole sequence
(`context_parallel`) and attends to them with its own queries, whose positions make the causal mask. Simple and exact,
at the price of whole keys and values in memory; the scores, which are far larger, stay split. A probe is shown what the
rank holds: its share of the sequence, and the gradients of keys and values after their sum over the ranks.
"""

from megatron.core import _overlay

_overlay.module(globals())

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron.core.context_parallel import gather_sequence, positions_of
from megatron.core.probe import ATTENTION_PROBS, Probe, maximum_over_shards
from megatron.core.transformer.attention_watch import watched
from megatron.quantscope.gemm import AttentionQuant, Tap
from megatron.quantscope.gemm.attention import attention

_upstream_init, _upstream_forward = DotProductAttention.__init__, DotProductAttention.forward
_LARGEST_SEED = 2**63 - 1


def head_facts(module: torch.nn.Module) -> dict[str, Any]:
    """The head_dim and the softmax_scale of an attention, as rows of it tell them."""
    by_softmax = module.scale_mask_softmax.scale  # of apply_query_key_layer_scaling: gives back what the scores lack
    return {
        "head_dim": int(module.hidden_size_per_attention_head),
        "softmax_scale": float(module.softmax_scale * (by_softmax or 1)),
    }


def _init(self: torch.nn.Module, config: TransformerConfig, *args: Any, **options: Any) -> None:
    """Upstream's `__init__`; where ranks share a sequence it is told that they do not, and `forward` is ours.

    Raises:
        ValueError: for a sliding window over a shared sequence: upstream makes the mask of it for whole ones.
    """
    if config.context_parallel_size == 1:
        _upstream_init(self, config, *args, **options)
        return
    if config.window_size is not None:
        raise ValueError("context parallelism does not support a sliding window (window_size)")
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    alone.masked_softmax_fusion = False  # its causal kernel knows square score matrices only
    _upstream_init(self, alone, *args, **options)
    self.config = config
    self.cp_group = parallel_state.get_context_parallel_group()
    self.forward = functools.partial(_shared_forward, self)


def _is_shared(module: torch.nn.Module) -> bool:
    """Whether context parallel ranks share a sequence."""
    return module.config.context_parallel_size > 1


def _shared_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Tensor:
    """Upstream's `forward` of this rank's queries, and the keys and values of all ranks."""
    positions = positions_of(module.cp_group, query.size(0), query.device)
    key, value = (gather_sequence(share, module.cp_group) for share in (key, value))
    if attention_mask is None and module.attn_mask_type == AttnMaskType.causal:
        attention_mask = torch.arange(key.size(0), device=key.device) > positions[:, None]
        attention_mask = attention_mask[None, None]
    return _upstream_forward(module, query, key, value, attention_mask, **options)


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
    tap, shared = probe.tap(), _is_shared(module)
    if probe.quant is None:
        forward = functools.partial(_shared_forward if shared else _upstream_forward, module)
        inside, outside = None, tap
    else:
        # It shows its operands itself, bar a shared sequence: its keys and values are then more than this rank holds.
        inside, outside = (None, tap) if shared else (tap, None)
        shown = probe.shows("forward", "post", ATTENTION_PROBS)
        forward = functools.partial(_quantised_forward, module, quant=probe.quant, tap=inside, show_probabilities=shown)
    if outside is not None:
        forward = functools.partial(watched, forward, outside)
    return forward(query, key, value, attention_mask, **options)


def _quantised_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    quant: AttentionQuant,
    tap: Tap | None,
    show_probabilities: Callable[[Tensor], None] | None,
    **options: Any,
) -> Tensor:
    """Attention with quantised operands; they go to `tap` as the GEMMs have them, whole keys and values among them."""
    unsupported = [name for name in ("attention_bias", "packed_seq_params") if options.get(name) is not None]
    if unsupported:
        raise RuntimeError(f"quantised attention does not support {', '.join(unsupported)}; use --quant-scope linear")
    positions: dict[str, Tensor] = {}
    if _is_shared(module):
        key, value = (gather_sequence(share, module.cp_group) for share in (key, value))
        positions["query_positions"] = positions_of(module.cp_group, query.size(0), query.device)
        positions["key_positions"] = torch.arange(key.size(0), device=key.device)
    return attention(
        query,
        key,
        value,
        quant=quant,
        softmax_scale=module.softmax_scale,
        causal=module.attn_mask_type == AttnMaskType.causal and attention_mask is None,
        mask=attention_mask,
        **positions,
        dropout=module.attention_dropout.p if module.training else 0.0,
        seed=functools.partial(_dropout_seed, module, query.device),
        softmax_in_fp32=module.config.attention_softmax_in_fp32,
        tap=tap,
        show_probabilities=show_probabilities,
        reduce_amax=maximum_over_shards(module),
    )


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


DotProductAttention.__init__ = _init
DotProductAttention.attach_probe = _attach_probe
