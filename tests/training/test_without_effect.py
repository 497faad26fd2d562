"""Flags that do nothing without another one: each named once, with what it needs, and no flag that does something."""

import pytest

from megatron.training import main as command_line
from megatron.training.checks.without_effect import NEEDS

# Flag -> a value that is not its default's, for those that take one.
VALUES = {
    "--save-retain-interval": 2,
    "--exit-signal": "SIGUSR1",
    "--tensorboard-log-interval": 5,
    "--tensorboard-queue-size": 5,
    "--timing-log-option": "max",
    "--manual-gc-interval": 10,
    "--profile-step-start": 1,
    "--profile-step-end": 20,
    "--profile-ranks": [0, 1],
    "--memory-snapshot-path": "memory.pickle",
    "--loss-scale": 128,
    "--initial-loss-scale": 128,
    "--min-loss-scale": 2,
    "--loss-scale-window": 10,
    "--hysteresis": 3,
    "--adam-beta1": 0.8,
    "--adam-beta2": 0.95,
    "--adam-eps": 1e-6,
    "--sgd-momentum": 0.8,
    "--decoupled-min-lr": 1e-5,
    "--lr-wsd-decay-style": "linear",
    "--lr-wsd-decay-iters": 2,
    "--lr-wsd-decay-samples": 2,
    "--start-weight-decay": 0.1,
    "--end-weight-decay": 0.2,
    "--cross-entropy-fusion-impl": "te",
    "--recompute-method": "block",
    "--recompute-num-layers": 1,
    "--num-query-groups": 2,
    "--rope-scaling-factor": 32,
    "--moe-layer-freq": 2,
    "--moe-router-topk": 3,
    "--moe-router-score-function": "sigmoid",
    "--moe-router-topk-scaling-factor": 2.5,
    "--moe-router-dtype": "fp32",
    "--moe-router-bias-update-rate": 1e-2,
    "--moe-router-load-balancing-type": "seq_aux_loss",
    "--moe-aux-loss-coeff": 1e-2,
    "--moe-z-loss-coeff": 1e-3,
    "--moe-input-jitter-eps": 1e-2,
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-expert-capacity-factor": 1.5,
    "--moe-token-drop-policy": "position",
    "--expert-tensor-parallel-size": 1,
}
# Flag -> others that have to be given with it.
ALONG = {
    "--lr-wsd-decay-samples": {"train_iters": None, "train_samples": 64},
    "--adam-beta1": {"optimizer": "sgd"},
    "--adam-beta2": {"optimizer": "sgd"},
    "--adam-eps": {"optimizer": "sgd"},
    "--moe-router-enable-expert-bias": {"moe_router_score_function": "sigmoid"},
    "--moe-pad-expert-input-to-capacity": {"moe_expert_capacity_factor": 1.5},
}
# What is needed -> flags that are it.
MET = {
    "--save": {"save": "here"},
    "--exit-signal-handler": {"exit_signal_handler": True, "save": "here"},
    "--load": {"load": "here", "save": "here"},
    "--tensorboard-dir": {"tensorboard_dir": "here"},
    "--timing-log-level": {"timing_log_level": 1},
    "--manual-gc": {"manual_gc": True},
    "--profile": {"profile": True, "save": "here"},
    "--record-memory-history": {"record_memory_history": True},
    "--fp16, --bf16 or --use-distributed-optimizer": {"bf16": True},
    "--fp16 without --loss-scale": {"fp16": True},
    "--optimizer adam": {"optimizer": "adam"},
    "--optimizer sgd": {"optimizer": "sgd"},
    "--decoupled-lr": {"decoupled_lr": 1e-3},
    "--lr-decay-style WSD": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2},
    "--weight-decay-incr-style linear or cosine": {
        "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.2,
    },
    "--cross-entropy-loss-fusion": {"cross_entropy_loss_fusion": True},
    "--recompute-granularity full": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "--group-query-attention": {"group_query_attention": True, "num_query_groups": 2},
    "--use-rope-scaling": {"use_rope_scaling": True},
    "--num-experts": {"num_experts": 4},
}
ROWS = [(need, name) for need in NEEDS for name in need.flags]


@pytest.fixture(autouse=True)
def _of_any_machine(monkeypatch):
    """Packages, paths and ranks are not what this is about."""
    monkeypatch.setattr("megatron.training.validation._check_paths", lambda args: None)
    monkeypatch.setattr("megatron.training.checks.kernels._engine_is_missing", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")


def given(name):
    return {name.removeprefix("--").replace("-", "_"): VALUES.get(name, True)}


@pytest.mark.parametrize(("need", "name"), ROWS, ids=[f"{name} {need.needs}" for need, name in ROWS])
def test_each_is_named_with_what_it_needs(parse, need, name):
    line = parse(**(ALONG.get(name, {}) | given(name))).without_effect
    prefix, _, listed = line.partition(": ")
    assert prefix == "without effect here"
    assert f"{need.part}{name} (needs {need.needs})" in listed


@pytest.mark.parametrize("need", NEEDS, ids=[need.needs for need in NEEDS])
def test_it_is_not_named_when_what_it_needs_is_there(parse, need):
    for name in need.flags:
        changes = ALONG.get(name, {}) | given(name) | MET[need.needs]
        if "lr_wsd_decay_samples" in changes:
            changes["lr_wsd_decay_iters"] = None
        assert f"(needs {need.needs})" not in (parse(**changes).without_effect or "")


def test_a_small_run_gives_nothing_in_vain(parse):
    assert parse().without_effect is None
    assert parse(exit_signal="SIGTERM", tensorboard_log_interval=1).without_effect is None  # defaults


@pytest.mark.parametrize(("rank", "said"), [(0, True), (1, False)])
def test_the_first_rank_says_it_before_torch_is_loaded(command, monkeypatch, capsys, rank, said):
    monkeypatch.setenv("RANK", str(rank))
    said_first = []

    def stop():
        said_first.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_import_core", stop)
    command_line.main(command(async_save=True, manual_gc_interval=5))
    line = "without effect here: --async-save (needs --save), --manual-gc-interval (needs --manual-gc)\n"
    assert said_first == [line if said else ""]


def test_the_query_heads_of_a_checkpoint_were_not_given(parse, monkeypatch):
    """A checkpoint's model flags are complete: as many query groups as heads, where they are not shared."""

    def apply(args, directory):
        vars(args).update(num_query_groups=4, group_query_attention=False)

    monkeypatch.setattr("megatron.training.arguments.apply_architecture", apply)
    assert parse(use_checkpoint_args=True, load="here", save="here").without_effect is None
