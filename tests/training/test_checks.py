"""Each row of the tables of wrong combinations, wrong once: the whole line and the exit code."""

import re

import pytest

from megatron.training.checks import (
    CHECKPOINT_CHECKS,
    DATA_CHECKS,
    EXPERT_CHECKS,
    KERNEL_CHECKS,
    MODEL_CHECKS,
    PARALLELISM_CHECKS,
    QUANTIZED_KERNEL_CHECKS,
    REPORTING_CHECKS,
    SCHEDULE_CHECKS,
)
from megatron.training.main import main
from tests.training.layout_cases import LAYOUT_CASES

TABLES = {
    "model": MODEL_CHECKS,
    "parallelism": PARALLELISM_CHECKS,
    "experts": EXPERT_CHECKS,
    "kernels": KERNEL_CHECKS + QUANTIZED_KERNEL_CHECKS,
    "schedule": SCHEDULE_CHECKS,
    "reporting": REPORTING_CHECKS,
    "data": DATA_CHECKS,
    "checkpoint": CHECKPOINT_CHECKS,
}
TWO_BY_TENSOR = {"tensor_model_parallel_size": 2}
ENGINE = {"transformer_impl": "transformer_engine"}
NOT_QUANTIZED = "--quant-type mxfp8 or fp8_e4m3 quantises the GEMMs of the local layers"
BY_SAMPLES = {"train_iters": None, "train_samples": 64}
PARTS = (
    "world size {} is not a multiple of tensor x pipeline x context parallel size ({} x {} x {}); start as many ranks "
    "with torchrun --nproc_per_node"
)

# Changes of the small run -> ranks -> the line.
CASES = [
    ({"ckpt_step": 3}, 1, "--ckpt-step 3 says which checkpoint to load, and needs --load"),
    (
        {"save": "checkpoints", "save_interval": 2, "save_retain_interval": 3},
        1,
        "--save-retain-interval 3 is not a multiple of --save-interval 2",
    ),
    (
        {"dist_ckpt_optim_fully_reshardable": True},
        1,
        "--dist-ckpt-optim-fully-reshardable is about the state of --use-distributed-optimizer; any other optimizer's "
        "can be loaded under any layout",
    ),
    (
        {"num_layers": None},
        1,
        "--num-layers, --hidden-size and --num-attention-heads are needed, or --use-checkpoint-args with --load",
    ),
    ({"seq_length": None}, 1, "--seq-length is needed"),
    (
        {"hidden_size": 66},
        1,
        "--hidden-size 66 is not a multiple of --num-attention-heads 4; set --kv-channels, or choose other sizes",
    ),
    (
        {"group_query_attention": True, "num_query_groups": 3},
        1,
        "--num-attention-heads 4 is not a multiple of --num-query-groups 3",
    ),
    ({"swiglu": True, "squared_relu": True}, 1, "--swiglu and --squared-relu exclude each other"),
    ({"bf16": True, "fp16": True}, 1, "--bf16 and --fp16 exclude each other"),
    ({"max_position_embeddings": 16}, 1, "--seq-length 32 is longer than --max-position-embeddings 16"),
    (TWO_BY_TENSOR, 3, PARTS.format(3, 2, 1, 1)),
    (
        TWO_BY_TENSOR | {"num_attention_heads": 3, "hidden_size": 63},
        2,
        "--num-attention-heads 3 is not a multiple of --tensor-model-parallel-size 2",
    ),
    (
        TWO_BY_TENSOR | {"group_query_attention": True, "num_query_groups": 1},
        2,
        "--num-query-groups 1 is not a multiple of --tensor-model-parallel-size 2",
    ),
    (
        TWO_BY_TENSOR | {"ffn_hidden_size": 33},
        2,
        "--ffn-hidden-size 33 is not a multiple of --tensor-model-parallel-size 2",
    ),
    (
        TWO_BY_TENSOR | {"sequence_parallel": True, "seq_length": 33},
        2,
        "--seq-length 33 is not a multiple of --context-parallel-size 1 x --tensor-model-parallel-size 2, which "
        "--sequence-parallel needs",
    ),
    ({"context_parallel_size": 2}, 3, PARTS.format(3, 1, 1, 2)),
    ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 2, PARTS.format(2, 2, 1, 2)),
    (
        {"context_parallel_size": 2, "seq_length": 34},
        2,
        "--seq-length 34 is not a multiple of twice --context-parallel-size 2",
    ),
    (
        {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 36},
        8,
        "--seq-length 36 is not a multiple of --context-parallel-size 2 x --tensor-model-parallel-size 4, which "
        "--sequence-parallel needs",
    ),
    (
        {"pipeline_model_parallel_size": 2, "num_layers": 3},
        2,
        "--num-layers 3 is not a multiple of --pipeline-model-parallel-size 2",
    ),
    (
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        1,
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
    ),
    *(
        ({flag.replace("-", "_"): value}, 1, f"--{flag} needs --transformer-impl transformer_engine; {NOT_QUANTIZED}")
        for flag, value in (
            ("fp8-format", "hybrid"),
            ("fp8-recipe", "mxfp8"),
            ("fp8-margin", 1),
            ("fp8-interval", 2),
            ("fp8-amax-history-len", 1024),
            ("fp8-amax-compute-algo", "max"),
            ("no-fp8-wgrad", True),
            ("tp-only-amax-red", True),
            ("fp8-param-gather", True),
            ("first-last-layers-bf16", True),
            ("num-layers-at-start-in-bf16", 2),
            ("num-layers-at-end-in-bf16", 2),
            ("fp4-format", "e2m1"),
        )
    ),
    (
        {"attention_backend": "fused"},
        1,
        "--attention-backend fused needs --transformer-impl transformer_engine; local has auto, flash and unfused",
    ),
    (
        ENGINE | {"attention_backend": "local"},
        1,
        "--attention-backend local needs --transformer-impl local; transformer_engine has auto, flash, fused, unfused",
    ),
    (
        ENGINE,
        1,
        "--transformer-impl transformer_engine needs the package transformer-engine, which is not installed",
    ),
    (
        {"cross_entropy_fusion_impl": "te"},
        1,
        "--cross-entropy-fusion-impl te needs the package transformer-engine, which is not installed",
    ),
    (
        ENGINE | TWO_BY_TENSOR | {"num_experts": 4, "sequence_parallel": True, "disable_bias_linear": True},
        2,
        "--num-experts with --transformer-impl transformer_engine needs --tensor-model-parallel-size 1: how tensors "
        "of split experts lie over ranks is not known to the capture",
    ),
    (ENGINE | {"fp8_format": "e4m3", "fp4_format": "e2m1"}, 1, "--fp8-format and --fp4-format exclude each other"),
    (
        ENGINE | {"fp8_format": "e4m3", "fp8_param_gather": True},
        1,
        "--fp8-param-gather needs --fp8-format and --use-distributed-optimizer",
    ),
    (
        ENGINE | {"fp8_format": "hybrid", "first_last_layers_bf16": True},
        1,
        "--first-last-layers-bf16 does not go with --fp8-recipe delayed, whose scales are kept for all layers together",
    ),
    (
        ENGINE | {"fp8_format": "hybrid", "tensor_check_interference": True},
        1,
        "--tensor-check-interference trains steps twice, and the amax history of --fp8-recipe delayed has no way back",
    ),
    (
        {"tensor_points": "attention_probs", "attention_backend": "flash"},
        1,
        "--tensor-points attention_probs needs --transformer-impl local and --attention-backend unfused: fused and "
        "flash kernels hold no probabilities",
    ),
    (
        ENGINE | {"quant_type": "mxfp8"},
        1,
        "--quant-type does not go with --transformer-impl transformer_engine, which runs GEMMs of its own; use "
        "--transformer-impl local, or TransformerEngine's --fp8-format",
    ),
    (
        {"quant_type": "mxfp8", "attention_backend": "flash"},
        1,
        "--attention-backend flash does not go with quantised attention, which runs its own kernel; use "
        "--attention-backend auto, or --quant-scope linear",
    ),
    (
        {"overlap_param_gather": True, "overlap_grad_reduce": True},
        1,
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    ),
    (
        {"accumulate_allreduce_grads_in_fp32": True, "grad_reduce_in_bf16": True},
        1,
        "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16 exclude each other",
    ),
    ({"micro_batch_size": None}, 1, "--micro-batch-size is needed"),
    (
        {"micro_batch_size": 2, "global_batch_size": 6},
        2,
        "--global-batch-size 6 is not a multiple of --micro-batch-size 2 x data parallel size 2",
    ),
    ({"train_samples": 64}, 1, "give either --train-iters or --train-samples"),
    ({"train_iters": None}, 1, "give either --train-iters or --train-samples"),
    (
        {"lr_warmup_samples": 2},
        1,
        "--train-iters goes with --lr-decay-iters, --lr-warmup-iters and --lr-wsd-decay-iters, not with samples",
    ),
    (
        BY_SAMPLES | {"lr_decay_iters": 2},
        1,
        "--train-samples goes with --lr-decay-samples, --lr-warmup-samples and --lr-wsd-decay-samples, not with "
        "iterations",
    ),
    (
        {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 1},
        1,
        "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples",
    ),
    ({"lr_warmup_fraction": 1.0}, 1, "--lr-warmup-fraction 1 leaves nothing to decay in; warm up shorter"),
    (
        {"lr_warmup_iters": 3, "lr_decay_iters": 3},
        1,
        "--lr-warmup-iters 3 is not below --lr-decay-iters 3; warm up shorter",
    ),
    (
        {"lr_warmup_iters": 4},
        1,
        "--lr-warmup-iters 4 is not below --train-iters 4, the default of --lr-decay-iters; warm up shorter",
    ),
    (
        BY_SAMPLES | {"lr_warmup_samples": 9, "lr_decay_samples": 8},
        1,
        "--lr-warmup-samples 9 is not below --lr-decay-samples 8; warm up shorter",
    ),
    (
        BY_SAMPLES | {"lr_warmup_samples": 65},
        1,
        "--lr-warmup-samples 65 is not below --train-samples 64, the default of --lr-decay-samples; warm up shorter",
    ),
    ({"rampup_batch_size": [2, 2, 8], "global_batch_size": 8}, 1, "--rampup-batch-size needs --train-samples"),
    (
        BY_SAMPLES | {"rampup_batch_size": [9, 1, 8], "global_batch_size": 8},
        1,
        "--rampup-batch-size starts at 9, not below --global-batch-size 8",
    ),
    (
        BY_SAMPLES | {"rampup_batch_size": [8, 1, 8], "global_batch_size": 8},
        1,
        "--rampup-batch-size starts at 8, not below --global-batch-size 8",
    ),
    (
        BY_SAMPLES | {"rampup_batch_size": [2, 2, 8], "global_batch_size": 8, "micro_batch_size": 2},
        2,
        "--rampup-batch-size 2 2: start and increment must be multiples of --micro-batch-size 2 x data parallel size 2",
    ),
    (
        BY_SAMPLES | {"rampup_batch_size": [2, 4, 8], "global_batch_size": 8},
        1,
        "--rampup-batch-size does not reach --global-batch-size 8 from 2 in steps of 4",
    ),
    ({"lr": None}, 1, "--lr is needed"),
    ({"lr": 1e-4, "min_lr": 1e-3}, 1, "--min-lr 0.001 is above --lr 0.0001"),
    ({"lr": 1e-4, "lr_warmup_init": 1e-3}, 1, "--lr-warmup-init 0.001 is above --lr 0.0001"),
    (
        {"lr_decay_style": "WSD"},
        1,
        "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples",
    ),
    (
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1},
        1,
        "--weight-decay-incr-style linear needs --start-weight-decay and --end-weight-decay",
    ),
    (
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.01},
        1,
        "--end-weight-decay 0.01 is below --start-weight-decay 0.1",
    ),
    (
        {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
        1,
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other",
    ),
    ({"mock_data": None}, 1, "give one of --data-path, --train-data-path and --mock-data"),
    ({"data_path": "somewhere"}, 1, "give one of --data-path, --train-data-path and --mock-data"),
    (
        {"mock_data": None, "train_data_path": "somewhere", "split": "99,1,0"},
        1,
        "--split goes with --data-path, not with --train-data-path",
    ),
    (
        {"tokenizer_type": None},
        1,
        "--tokenizer-type is needed; with --mock-data, NullTokenizer and --vocab-size will do",
    ),
    ({"vocab_size": None}, 1, "--tokenizer-type NullTokenizer needs --vocab-size"),
    (
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "vocab.json"},
        1,
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
    ),
    (
        {"tokenizer_type": "HuggingFaceTokenizer"},
        1,
        "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model",
    ),
    ({"save_interval": 2}, 1, "--save-interval needs --save"),
    (
        {"profile": True, "profile_step_start": 3, "profile_step_end": 3},
        1,
        "--profile-step-end 3 is not above --profile-step-start 3",
    ),
    ({"profile": True, "profile_ranks": [0, 2]}, 2, "--profile-ranks [0, 2]: there are 2 ranks, counted from 0"),
    (
        {"profile": True, "use_pytorch_profiler": True},
        1,
        "--use-pytorch-profiler writes its trace to --tensorboard-dir or --save: give one",
    ),
    ({"log_progress": True}, 1, "--log-progress needs --save"),
    *LAYOUT_CASES,
]


@pytest.mark.parametrize(("changes", "ranks", "line"), CASES, ids=[f"{n:02d}" for n in range(len(CASES))])
def test_wrong_combination(command, monkeypatch, capsys, changes, ranks, line):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("megatron.training.main._import_core", lambda: pytest.fail("nothing was refused"))
    monkeypatch.setattr("megatron.training.checks.kernels._engine_is_missing", lambda: "not installed" in line)
    assert main(command(**changes)) == 2
    assert capsys.readouterr() == ("", f"pretrain_gpt.py: error: {line}\n")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_has_a_case(table):
    lines = [line for _, _, line in CASES]
    for _, template in table:
        pattern = ".+".join(map(re.escape, re.split(r"\{[^}]*\}", template)))
        assert any(re.fullmatch(pattern, line) for line in lines), template


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1),
        ({"hidden_size": 66, "kv_channels": 16}, 1),
        ({"group_query_attention": True, "num_query_groups": 2}, 1),
        (TWO_BY_TENSOR | {"sequence_parallel": True}, 2),
        (TWO_BY_TENSOR, 4),
        ({"context_parallel_size": 2}, 4),
        (TWO_BY_TENSOR | {"context_parallel_size": 4, "sequence_parallel": True, "seq_length": 8}, 8),
        ({"pipeline_model_parallel_size": 2}, 2),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, 1),
        ({"overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": True}, 1),
        (BY_SAMPLES | {"rampup_batch_size": [2, 2, 8], "global_batch_size": 8}, 1),
        (BY_SAMPLES | {"lr_decay_samples": 32, "lr_warmup_samples": 8}, 1),
        ({"lr": 1e-3, "min_lr": 1e-3, "lr_warmup_init": 1e-3}, 1),
        ({"attention_backend": "flash", "quant_type": "mxfp8", "quant_scope": "linear"}, 1),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 1}, 1),
        ({"lr_warmup_iters": 3}, 1),
        ({"lr_warmup_iters": 7, "lr_decay_iters": 8}, 1),
        (BY_SAMPLES | {"lr_warmup_samples": 63}, 1),
        ({"lr_warmup_fraction": 0.99}, 1),
        ({"weight_decay_incr_style": "cosine", "start_weight_decay": 0.0, "end_weight_decay": 0.1}, 1),
    ],
)
def test_right_combination_on_the_edge(parse, monkeypatch, changes, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert parse(**changes).world_size == ranks
