"""Mixtures of experts that do not fit their router, each other, or the ranks they are spread over."""

from __future__ import annotations

import argparse

from megatron.training.checks.table import Check

ALL_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")  # what goes with a capacity, as upstream says


def _balancing(args: argparse.Namespace) -> list[str]:
    value = args.moe_router_load_balancing_type
    return list(value) if isinstance(value, list) else [value]


def _coefficients(args: argparse.Namespace) -> int:
    value = args.moe_aux_loss_coeff
    return len(value) if isinstance(value, list) else 1


def _ranks_of_a_sample(args: argparse.Namespace) -> int:
    return int(args.tensor_model_parallel_size * args.context_parallel_size)


EXPERT_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.num_experts is None and a.expert_model_parallel_size > 1,
        "--expert-model-parallel-size {expert_model_parallel_size} needs --num-experts",
    ),
    (
        lambda a: a.num_experts is None and (a.moe_ffn_hidden_size or a.moe_shared_expert_intermediate_size),
        "--moe-ffn-hidden-size and --moe-shared-expert-intermediate-size need --num-experts",
    ),
    (
        lambda a: a.num_experts is None and (a.moe_router_num_groups or a.moe_router_group_topk),
        "--moe-router-num-groups and --moe-router-group-topk need --num-experts",
    ),
    (
        lambda a: a.num_experts is not None and a.num_experts % a.expert_model_parallel_size,
        "--num-experts {num_experts} is not a multiple of --expert-model-parallel-size {expert_model_parallel_size}",
    ),
    (
        lambda a: a.num_experts is not None and a.moe_router_topk > a.num_experts,
        "--moe-router-topk {moe_router_topk} is more than --num-experts {num_experts}",
    ),
    (
        lambda a: isinstance(a.moe_layer_freq, list) and len(a.moe_layer_freq) != a.num_layers,
        "--moe-layer-freq {moe_layer_freq} does not name each of the {num_layers} layers of --num-layers",
    ),
    (
        lambda a: (
            a.moe_router_topk == 1
            and a.moe_router_score_function == "softmax"
            and not a.moe_router_pre_softmax
            and "sinkhorn" not in _balancing(a)
        ),
        "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one chosen expert has no gradient",
    ),
    (
        lambda a: _coefficients(a) != len(_balancing(a)),
        "--moe-aux-loss-coeff needs one value for each of --moe-router-load-balancing-type",
    ),
    (
        lambda a: "sinkhorn" in _balancing(a) and (len(_balancing(a)) > 1 or a.moe_aux_loss_coeff),
        "--moe-router-load-balancing-type sinkhorn goes alone, and without --moe-aux-loss-coeff",
    ),
    (
        lambda a: a.moe_expert_capacity_factor is not None and not set(_balancing(a)) <= set(ALL_BALANCING),
        "--moe-expert-capacity-factor does not go with --moe-router-load-balancing-type sinkhorn",
    ),
    (
        lambda a: a.moe_pad_expert_input_to_capacity and a.moe_expert_capacity_factor is None,
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
    ),
    (
        lambda a: a.moe_router_enable_expert_bias and a.moe_router_score_function != "sigmoid",
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
    ),
    (
        lambda a: bool(a.moe_router_num_groups) != bool(a.moe_router_group_topk),
        "--moe-router-num-groups and --moe-router-group-topk need each other",
    ),
    (
        lambda a: (
            a.num_experts is not None
            and a.moe_router_num_groups
            and (a.num_experts % a.moe_router_num_groups or a.moe_router_group_topk > a.moe_router_num_groups)
        ),
        "--num-experts {num_experts} can not be cut into --moe-router-num-groups {moe_router_num_groups}, of which a "
        "token takes --moe-router-group-topk {moe_router_group_topk}",
    ),
    (
        lambda a: a.moe_token_dispatcher_type == "flex",
        "--moe-token-dispatcher-type flex needs DeepEP's kernels, which are not supported; allowed are allgather and "
        "alltoall",
    ),
    (
        lambda a: a.num_experts is not None and a.add_bias_linear and a.expert_tensor_parallel_size > 1,
        "--expert-tensor-parallel-size {expert_tensor_parallel_size} needs --disable-bias-linear: megatron-core adds "
        "an expert's bias on one rank only",
    ),
    (
        lambda a: a.num_experts is not None and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
        "--num-experts with --tensor-model-parallel-size {tensor_model_parallel_size} needs --sequence-parallel",
    ),
    (
        lambda a: a.num_experts is not None and a.moe_ffn_hidden_size % a.expert_tensor_parallel_size,
        "--moe-ffn-hidden-size {moe_ffn_hidden_size} is not a multiple of --expert-tensor-parallel-size "
        "{expert_tensor_parallel_size}",
    ),
    (
        lambda a: (
            a.num_experts is not None
            and a.moe_shared_expert_intermediate_size
            and a.moe_shared_expert_intermediate_size % a.tensor_model_parallel_size
        ),
        "--moe-shared-expert-intermediate-size {moe_shared_expert_intermediate_size} is not a multiple of "
        "--tensor-model-parallel-size {tensor_model_parallel_size}",
    ),
    (
        lambda a: (
            a.num_experts is not None
            and a.world_size
            % (a.expert_tensor_parallel_size * a.expert_model_parallel_size * a.pipeline_model_parallel_size)
        ),
        "world size {world_size} is not a multiple of expert tensor x expert x pipeline parallel size "
        "({expert_tensor_parallel_size} x {expert_model_parallel_size} x {pipeline_model_parallel_size}); start as "
        "many ranks with torchrun --nproc_per_node",
    ),
    (
        lambda a: (
            a.num_experts is not None
            and a.expert_model_parallel_size == 1
            and a.expert_tensor_parallel_size != a.tensor_model_parallel_size
        ),
        "--expert-tensor-parallel-size {expert_tensor_parallel_size} other than --tensor-model-parallel-size "
        "{tensor_model_parallel_size} needs --expert-model-parallel-size > 1: megatron-core adds up such experts' "
        "gradients over the wrong ranks else",
    ),
    (
        lambda a: (
            a.num_experts is not None
            and a.expert_model_parallel_size > 1
            and a.expert_tensor_parallel_size * a.expert_model_parallel_size % _ranks_of_a_sample(a)
        ),
        "--expert-tensor-parallel-size {expert_tensor_parallel_size} x --expert-model-parallel-size "
        "{expert_model_parallel_size} is not a multiple of tensor x context parallel size "
        "({tensor_model_parallel_size} x {context_parallel_size}): only some of the ranks that share a sample would "
        "share its experts",
    ),
)
