"""Ways to split the work over ranks that the sizes of the model, or each other, rule out."""

from __future__ import annotations

from megatron.training.checks.pipeline import PIPELINE_CHECKS
from megatron.training.checks.table import Check

PARALLELISM_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.seq_length > a.max_position_embeddings,
        "--seq-length {seq_length} is longer than --max-position-embeddings {max_position_embeddings}",
    ),
    (
        lambda a: (
            a.world_size % (a.tensor_model_parallel_size * a.pipeline_model_parallel_size * a.context_parallel_size)
        ),
        "world size {world_size} is not a multiple of tensor x pipeline x context parallel size "
        "({tensor_model_parallel_size} x {pipeline_model_parallel_size} x {context_parallel_size}); start as many "
        "ranks with torchrun --nproc_per_node",
    ),
    (
        lambda a: a.num_attention_heads % a.tensor_model_parallel_size,
        "--num-attention-heads {num_attention_heads} is not a multiple of --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
    ),
    (
        lambda a: a.group_query_attention and a.num_query_groups % a.tensor_model_parallel_size,
        "--num-query-groups {num_query_groups} is not a multiple of --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
    ),
    (
        lambda a: a.ffn_hidden_size % a.tensor_model_parallel_size,
        "--ffn-hidden-size {ffn_hidden_size} is not a multiple of --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
    ),
    (
        lambda a: a.context_parallel_size > 1 and a.seq_length % (2 * a.context_parallel_size),
        "--seq-length {seq_length} is not a multiple of twice --context-parallel-size {context_parallel_size}",
    ),
    (
        lambda a: a.sequence_parallel and a.seq_length % (a.context_parallel_size * a.tensor_model_parallel_size),
        "--seq-length {seq_length} is not a multiple of --context-parallel-size {context_parallel_size} x "
        "--tensor-model-parallel-size {tensor_model_parallel_size}, which --sequence-parallel needs",
    ),
    *PIPELINE_CHECKS,
    (
        lambda a: a.overlap_param_gather and not (a.use_distributed_optimizer and a.overlap_grad_reduce),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    ),
    (
        lambda a: a.accumulate_allreduce_grads_in_fp32 and a.grad_reduce_in_bf16,
        "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16 exclude each other",
    ),
)
