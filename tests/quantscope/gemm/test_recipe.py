import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.quantscope.flags import QUANTIZATION_FLAGS, add_flags
from megatron.quantscope.flags.quantization import GEMMS, OPERANDS, QUANT_TYPES
from megatron.quantscope.gemm import AttentionQuant, LinearQuant, QuantConfig

ROOT = Path(__file__).resolve().parents[3]
LINEAR, ATTENTION = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.self_attention.core_attention"


def parse(*arguments: str) -> QuantConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, (QUANTIZATION_FLAGS,))
    return QuantConfig.from_namespace(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("CUSTOM_QUANT_TYPE", raising=False)


def test_nothing_is_quantised_by_default():
    config = parse()
    assert config == QuantConfig()
    assert (config.label, config.linear(LINEAR, 0, 4), config.attention(ATTENTION, 0, 4)) == ("none", None, None)


def test_environment_stands_in_for_the_flag_and_the_flag_wins(monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    assert parse().quant_type == "mxfp4"
    assert parse("--quant-type", "hifp8").quant_type == "hifp8"
    assert parse("--quant-type", "none").quant_type == "none"
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "")
    assert parse().quant_type == "none"


def test_wrong_environment_is_named(monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "fp3")
    with pytest.raises(ValueError, match="CUSTOM_QUANT_TYPE 'fp3' is not allowed: choose from none, bf16"):
        parse()


def test_the_environment_is_not_looked_at_where_something_is_given_by_hand(monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "foo")
    assert parse("--quant-type", "bf16").quant_type == "bf16"
    assert parse("--quant-preset", "ocp").quant_type == "mxfp8"


@pytest.mark.parametrize(("first", "last", "layers"), [(5, 0, 2), (0, 2, 2), (1, 1, 2)])
def test_skipping_every_layer_is_refused(first, last, layers):
    config = QuantConfig(quant_type="mxfp8", skip_first_layers=first, skip_last_layers=last)
    with pytest.raises(
        ValueError,
        match=f"--quant-skip-first-layers {first} and --quant-skip-last-layers {last} leave none of {layers} layers",
    ):
        config.require_layers(layers)
    config.require_layers(first + last + 1)
    QuantConfig(skip_first_layers=first, skip_last_layers=last).require_layers(layers)  # nothing is to be quantised


@pytest.mark.parametrize("quant_type", [name for name in QUANT_TYPES if name != "none"])
def test_every_type_reaches_every_operand(quant_type):
    config = parse("--quant-type", quant_type)
    for quant, kind in (
        (config.linear(LINEAR, 0, 1), LinearQuant),
        (config.attention(ATTENTION, 0, 1), AttentionQuant),
    ):
        assert isinstance(quant, kind)
        assert {name for operands in quant.gemms.values() for name in operands.values()} == {quant_type}
        expected = "pow2-amax" if quant_type in ("hifp8", "fp16") else "none"
        assert (quant.scale_rule, quant.grad_scale) == ("floor", expected)
    assert config.label == quant_type


def test_backward_type_is_for_gradient_operands_only():
    config = parse("--quant-type", "mxfp8", "--quant-backward-type", "mxfp8_e5m2")
    assert config.linear(LINEAR, 0, 1).formats() == {
        "fprop": {"x": "mxfp8", "w": "mxfp8"},
        "dgrad": {"dy": "mxfp8_e5m2", "w": "mxfp8"},
        "wgrad": {"dy": "mxfp8_e5m2", "x": "mxfp8"},
        "scale_rule": "floor",
        "grad_scale": "none",
    }
    assert config.attention(ATTENTION, 0, 1).formats() == {
        "scores": {"q": "mxfp8", "k": "mxfp8"},
        "context": {"p": "mxfp8", "v": "mxfp8"},
        "dv": {"p": "mxfp8", "do": "mxfp8_e5m2"},
        "dp": {"do": "mxfp8_e5m2", "v": "mxfp8"},
        "dq": {"ds": "mxfp8_e5m2", "k": "mxfp8"},
        "dk": {"ds": "mxfp8_e5m2", "q": "mxfp8"},
        "scale_rule": "floor",
        "grad_scale": "none",
    }


def test_gradient_scale_follows_the_backward_type_unless_given():
    assert (
        parse("--quant-type", "mxfp8", "--quant-backward-type", "hifp8").linear(LINEAR, 0, 1).grad_scale == "pow2-amax"
    )
    assert parse("--quant-type", "hifp8", "--quant-backward-type", "none").linear(LINEAR, 0, 1).grad_scale == "none"
    assert parse("--quant-type", "hifp8", "--quant-grad-scale", "none").linear(LINEAR, 0, 1).grad_scale == "none"
    assert parse("--quant-type", "mxfp8", "--quant-grad-scale", "1024").linear(LINEAR, 0, 1).grad_scale == 1024.0


@pytest.mark.parametrize(
    ("scope", "linear", "attention"), [("linear", True, False), ("attention", False, True), ("both", True, True)]
)
def test_scope(scope, linear, attention):
    config = parse("--quant-type", "mxfp8", "--quant-scope", scope)
    assert (config.linear(LINEAR, 0, 1) is not None, config.attention(ATTENTION, 0, 1) is not None) == (
        linear,
        attention,
    )


def test_skipped_layers_and_modules_outside_the_layers():
    config = parse("--quant-type", "mxfp8", "--quant-skip-first-layers", "2", "--quant-skip-last-layers", "1")
    assert [layer for layer in range(6) if config.linear(LINEAR, layer, 6)] == [2, 3, 4]
    assert [layer for layer in range(6) if config.attention(ATTENTION, layer, 6)] == [2, 3, 4]
    assert config.linear(LINEAR, None, 6) is None
    assert config.attention(ATTENTION, None, 6) is None
    assert [layer for layer in range(3) if config.linear(LINEAR, layer, 3)] == []


@pytest.mark.parametrize(
    ("parts", "quantised"),
    [
        (("x", "w"), {("fprop", "x"), ("fprop", "w"), ("dgrad", "w"), ("wgrad", "x")}),
        (("fprop",), {("fprop", "x"), ("fprop", "w")}),
        (("dy", "wgrad"), {("wgrad", "dy")}),
        (("w", "dgrad", "fprop"), {("fprop", "w"), ("dgrad", "w")}),
        (OPERANDS + GEMMS, {(gemm, operand) for gemm, operands in LinearQuant.GEMMS.items() for operand in operands}),
    ],
)
def test_operands_pick_parts_of_the_linear_gemms(parts, quantised):
    config = parse("--quant-type", "mxfp8", "--quant-operands", *parts)
    gemms = config.linear(LINEAR, 0, 1).gemms
    assert {(g, o) for g, operands in gemms.items() for o, name in operands.items() if name == "mxfp8"} == quantised
    assert {name for operands in config.attention(ATTENTION, 0, 1).gemms.values() for name in operands.values()} == {
        "mxfp8"
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_type": "fp3"}, "--quant-type 'fp3' is not allowed: choose from none, bf16"),
        ({"backward_type": "fp3", "quant_type": "bf16"}, "--quant-backward-type 'fp3' is not allowed"),
        ({"scope": "all"}, "--quant-scope 'all' is not allowed: choose from linear, attention, both"),
        ({"scale_rule": "up"}, "--quant-scale-rule 'up' is not allowed: choose from floor, rceil"),
        ({"operands": ("dx",)}, "--quant-operands 'dx' is not allowed: choose from x, w, dy, fprop, dgrad, wgrad"),
        ({"grad_scale": 3.0}, "gradient scale 3.0 is not allowed: give none, pow2-amax or a power of two"),
        ({"skip_first_layers": -1}, "must be >= 0"),
        ({"backward_type": "mxfp8"}, "--quant-backward-type mxfp8 needs a --quant-type other than none"),
    ],
)
def test_bad_values_are_refused_in_one_line(values, message):
    with pytest.raises(ValueError, match=message) as error:
        QuantConfig(**values)
    assert "\n" not in str(error.value)


def test_what_is_written_back_reads_back_to_the_same():
    parser = argparse.ArgumentParser()
    add_flags(parser, (QUANTIZATION_FLAGS,))
    namespace = parser.parse_args(["--quant-preset", "te-fp8-current", "--quant-skip-first-layers", "1"])
    config = QuantConfig.from_namespace(namespace)
    config.write_back(namespace)
    assert (namespace.quant_type, namespace.quant_backward_type, namespace.quant_scope) == (
        "fp8_e4m3",
        "fp8_e5m2",
        "linear",
    )
    assert (namespace.quant_scale_rule, namespace.quant_skip_last_layers) == ("floor", 0)
    assert QuantConfig.from_namespace(namespace) == config


def test_reading_the_flags_takes_no_torch():
    program = (
        "import sys; from argparse import Namespace; from megatron.quantscope.gemm.recipe import QuantConfig; "
        "assert QuantConfig.from_namespace(Namespace(quant_preset='ocp')).quant_type == 'mxfp8'; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
