"""What the flags, the environment and the defaults come to, and that later code finds it in the arguments."""

import pytest

from megatron.training.capture import settle
from megatron.training.failure import UsageError

DEFAULT_DIRECTORY = "enhanced_tensor_logs"


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ({}, {}, (False, DEFAULT_DIRECTORY, "none")),
        ({}, {"TENSOR_SAVE_ENABLED": "Yes"}, (True, DEFAULT_DIRECTORY, "none")),
        ({}, {"TENSOR_SAVE_ENABLED": "0"}, (False, DEFAULT_DIRECTORY, "none")),
        ({"save_tensors": True}, {"TENSOR_SAVE_ENABLED": "false"}, (True, DEFAULT_DIRECTORY, "none")),
        ({}, {"TENSOR_SAVE_DIR": "/from/outside"}, (False, "/from/outside", "none")),
        ({"tensor_save_dir": "/by/hand"}, {"TENSOR_SAVE_DIR": "/from/outside"}, (False, "/by/hand", "none")),
        ({}, {"CUSTOM_QUANT_TYPE": "hifp8"}, (False, DEFAULT_DIRECTORY, "hifp8")),
        ({"quant_type": "mxfp4"}, {"CUSTOM_QUANT_TYPE": "hifp8"}, (False, DEFAULT_DIRECTORY, "mxfp4")),
        ({"quant_type": "none"}, {"CUSTOM_QUANT_TYPE": "hifp8"}, (False, DEFAULT_DIRECTORY, "none")),
    ],
)
def test_flag_before_environment_before_default(parse, monkeypatch, flags, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    args = parse(**flags)
    recipe, capture = settle(args)
    assert (capture.enabled, str(capture.directory), recipe.quant_type) == expected
    assert (args.save_tensors, args.tensor_save_dir, args.quant_type) == expected


def test_settling_twice_changes_nothing(parse, monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp8")
    args = parse(save_tensors=True)
    first = settle(args)
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    assert settle(args) == first


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        ({}, {"CUSTOM_QUANT_TYPE": "mxfp9"}, ["CUSTOM_QUANT_TYPE", "mxfp9", "nvfp4"]),
        ({}, {"TENSOR_SAVE_ENABLED": "perhaps"}, ["TENSOR_SAVE_ENABLED", "perhaps", "yes"]),
        ({"tensor_filter": ["colour=red"]}, {}, ["--tensor-filter", "colour", "layers"]),
        ({"tensor_schedule": "5:0"}, {}, ["--tensor-schedule", "5:0"]),
    ],
)
def test_value_that_is_not_allowed(parse, monkeypatch, flags, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        settle(parse(**flags))
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in said)


def test_recomputation_and_capture_go_together(parse):
    assert settle(parse(recompute_activations=True, save_tensors=True))[1].enabled


def test_flags_reach_recipe_and_capture(parse):
    recipe, capture = settle(
        parse(
            quant_type="mxfp8",
            quant_scope="linear",
            quant_backward_type="mxfp8_e5m2",
            quant_scale_rule="rceil",
            quant_grad_scale="1024",
            quant_skip_first_layers=1,
            control_iter=3,
            collect_micro_batches=2,
            tensor_budget_gb=0.5,
            tensor_on_error="stop",
        )
    )
    assert (recipe.scope, recipe.backward_type, recipe.scale_rule) == ("linear", "mxfp8_e5m2", "rceil")
    assert (recipe.grad_scale, recipe.skip_first_layers) == (1024.0, 1)
    assert (capture.control_iter, capture.collect_micro_batches) == (3, 2)
    assert (capture.budget_bytes, capture.stop_on_error) == (500_000_000, True)
