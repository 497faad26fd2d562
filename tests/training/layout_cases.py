"""Wrong combinations of pipelines and experts: changes of the small run -> ranks -> the line (`test_checks`)."""

STAGES = {"pipeline_model_parallel_size": 2}
FOUR_LAYERS = STAGES | {"num_layers": 4}
CHUNKS = FOUR_LAYERS | {"num_virtual_stages_per_pipeline_rank": 2}
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EXPERTS = {"num_experts": 4, "disable_bias_linear": True}
BY_TENSOR = {"tensor_model_parallel_size": 2}
SPLIT = EXPERTS | BY_TENSOR | {"sequence_parallel": True}

LAYOUT_CASES = [
    (
        {FIRST: 1},
        1,
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
        "--pipeline-model-parallel-size > 1",
    ),
    (
        FOUR_LAYERS | {FIRST: 4},
        2,
        "--num-layers 4 in 2 stages: the first has 4 and the last None (None: as the others); every stage needs a "
        "layer, and every layer a stage",
    ),
    (
        {"pipeline_model_parallel_size": 4, "num_layers": 6, FIRST: 2, LAST: 1},
        4,
        "--num-layers 6: what --decoder-first-pipeline-num-layers 2 and --decoder-last-pipeline-num-layers 1 leave is "
        "not a multiple of the stages that are left of --pipeline-model-parallel-size 4",
    ),
    (
        CHUNKS | {"num_layers_per_virtual_pipeline_stage": 1},
        2,
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other",
    ),
    (
        FOUR_LAYERS | {FIRST: 2, "num_layers_per_virtual_pipeline_stage": 1},
        2,
        "--num-layers-per-virtual-pipeline-stage does not go with stages of uneven length; give "
        "--num-virtual-stages-per-pipeline-rank",
    ),
    (
        STAGES | {"num_layers": 6, "num_layers_per_virtual_pipeline_stage": 2},
        2,
        "--num-layers 6 in 2 pipeline stages can not be cut into chunks of --num-layers-per-virtual-pipeline-stage 2",
    ),
    (
        {"num_virtual_stages_per_pipeline_rank": 2},
        1,
        "the interleaved schedule needs --pipeline-model-parallel-size > 1",
    ),
    (
        CHUNKS | {"no_overlap_p2p_communication": True},
        2,
        "the interleaved schedule with --no-overlap-p2p-communication needs --pipeline-model-parallel-size > 2, as in "
        "Megatron-LM",
    ),
    (
        STAGES | {"num_layers": 6, "num_virtual_stages_per_pipeline_rank": 2},
        2,
        "--num-layers 6 in 2 pipeline stages: the layers of a stage are not a multiple of its 2 model chunks",
    ),
    (
        CHUNKS | {"global_batch_size": 3},
        2,
        "the interleaved schedule takes micro-batches in groups of --pipeline-model-parallel-size 2: "
        "--global-batch-size 3 (and the steps of --rampup-batch-size) must be multiples of that x --micro-batch-size 1 "
        "x data parallel size 1",
    ),
    ({"expert_model_parallel_size": 2}, 2, "--expert-model-parallel-size 2 needs --num-experts"),
    (
        {"moe_ffn_hidden_size": 32},
        1,
        "--moe-ffn-hidden-size and --moe-shared-expert-intermediate-size need --num-experts",
    ),
    (
        EXPERTS | {"num_experts": 3, "expert_model_parallel_size": 2},
        2,
        "--num-experts 3 is not a multiple of --expert-model-parallel-size 2",
    ),
    (EXPERTS | {"moe_router_topk": 5}, 1, "--moe-router-topk 5 is more than --num-experts 4"),
    (
        EXPERTS | {"moe_layer_freq": "[0,1,1]"},
        1,
        "--moe-layer-freq [0, 1, 1] does not name each of the 2 layers of --num-layers",
    ),
    (
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        1,
        "--moe-router-num-groups and --moe-router-group-topk need --num-experts",
    ),
    (
        {"moe_router_topk": 1},  # megatron-core looks at it in a model without experts, too
        1,
        "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one chosen expert has no gradient",
    ),
    (
        EXPERTS | {"moe_router_topk": 1},
        1,
        "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one chosen expert has no gradient",
    ),
    (
        EXPERTS | {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.1},
        1,
        "--moe-aux-loss-coeff needs one value for each of --moe-router-load-balancing-type",
    ),
    (
        EXPERTS | {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1},
        1,
        "--moe-router-load-balancing-type sinkhorn goes alone, and without --moe-aux-loss-coeff",
    ),
    (
        EXPERTS | {"moe_router_load_balancing_type": "sinkhorn", "moe_expert_capacity_factor": 1.5},
        1,
        "--moe-expert-capacity-factor does not go with --moe-router-load-balancing-type sinkhorn",
    ),
    (
        EXPERTS | {"moe_pad_expert_input_to_capacity": True},
        1,
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
    ),
    (
        EXPERTS | {"moe_router_enable_expert_bias": True},
        1,
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
    ),
    (
        EXPERTS | {"moe_router_num_groups": 2},
        1,
        "--moe-router-num-groups and --moe-router-group-topk need each other",
    ),
    (
        EXPERTS | {"moe_router_num_groups": 3, "moe_router_group_topk": 1},
        1,
        "--num-experts 4 can not be cut into --moe-router-num-groups 3, of which a token takes "
        "--moe-router-group-topk 1",
    ),
    (
        EXPERTS | {"moe_token_dispatcher_type": "flex"},
        1,
        "--moe-token-dispatcher-type flex needs DeepEP's kernels, which are not supported; allowed are allgather and "
        "alltoall",
    ),
    (
        SPLIT | {"disable_bias_linear": None},
        2,
        "--expert-tensor-parallel-size 2 needs --disable-bias-linear: megatron-core adds an expert's bias on one rank "
        "only",
    ),
    (EXPERTS | BY_TENSOR, 2, "--num-experts with --tensor-model-parallel-size 2 needs --sequence-parallel"),
    (
        SPLIT | {"moe_ffn_hidden_size": 33},
        2,
        "--moe-ffn-hidden-size 33 is not a multiple of --expert-tensor-parallel-size 2",
    ),
    (
        SPLIT | {"moe_shared_expert_intermediate_size": 33},
        2,
        "--moe-shared-expert-intermediate-size 33 is not a multiple of --tensor-model-parallel-size 2",
    ),
    (
        EXPERTS | {"expert_model_parallel_size": 2},
        1,
        "world size 1 is not a multiple of expert tensor x expert x pipeline parallel size (1 x 2 x 1); start as many "
        "ranks with torchrun --nproc_per_node",
    ),
    (
        EXPERTS | {"expert_tensor_parallel_size": 2},
        2,
        "--expert-tensor-parallel-size 2 other than --tensor-model-parallel-size 1 needs --expert-model-parallel-size "
        "> 1: megatron-core adds up such experts' gradients over the wrong ranks else",
    ),
    (
        SPLIT | {"context_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        4,
        "--expert-tensor-parallel-size 1 x --expert-model-parallel-size 2 is not a multiple of tensor x context "
        "parallel size (2 x 2): only some of the ranks that share a sample would share its experts",
    ),
]
