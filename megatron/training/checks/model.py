"""Sizes and parts of the model that do not fit together."""

from __future__ import annotations

from megatron.training.checks.table import Check

MODEL_CHECKS: tuple[Check, ...] = (
    (
        lambda a: not (a.num_layers and a.hidden_size and a.num_attention_heads),
        "--num-layers, --hidden-size and --num-attention-heads are needed, or --use-checkpoint-args with --load",
    ),
    (
        lambda a: not (a.seq_length or a.max_position_embeddings),
        "--seq-length is needed",
    ),
    (
        lambda a: a.kv_channels is None and a.hidden_size % a.num_attention_heads,
        "--hidden-size {hidden_size} is not a multiple of --num-attention-heads {num_attention_heads}; set "
        "--kv-channels, or choose other sizes",
    ),
    (
        lambda a: a.group_query_attention and a.num_attention_heads % a.num_query_groups,
        "--num-attention-heads {num_attention_heads} is not a multiple of --num-query-groups {num_query_groups}",
    ),
    (
        lambda a: a.swiglu and a.squared_relu,
        "--swiglu and --squared-relu exclude each other",
    ),
    (
        lambda a: a.bf16 and a.fp16,
        "--bf16 and --fp16 exclude each other",
    ),
)
