"""Every preset against the recipe it is named after, written out by hand: operand by operand, GEMM by GEMM."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.quantscope.flags import QUANTIZATION_FLAGS, add_flags
from megatron.quantscope.flags.presets import PRESETS
from megatron.quantscope.gemm import QuantConfig

ROOT = Path(__file__).resolve().parents[3]
LINEAR, ATTENTION = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.self_attention.core_attention"

# (fprop x, fprop w), (dgrad dy, dgrad w), (wgrad dy, wgrad x), scale rule, gradient scale
LINEAR_TABLE = {
    "ocp": (("mxfp8", "mxfp8"), ("mxfp8", "mxfp8"), ("mxfp8", "mxfp8"), "floor", "none"),
    "te-mxfp8": (("mxfp8", "mxfp8"), ("mxfp8", "mxfp8"), ("mxfp8", "mxfp8"), "rceil", "none"),
    "te-fp8-current": (
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e4m3"),
        "floor",
        "none",
    ),
    "te-fp8-delayed": (
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e4m3"),
        "floor",
        "none",
    ),
    "te-nvfp4": (("nvfp4", "nvfp4"), ("nvfp4", "nvfp4"), ("nvfp4", "nvfp4"), "floor", "none"),
    "mxfp4-backward": (("none", "none"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp4"), "floor", "none"),
    "hif8": (("hifp8", "hifp8"), ("hifp8", "hifp8"), ("hifp8", "hifp8"), "floor", "pow2-amax"),
}
# What q, k, p, v, do and ds are; None: attention is left as it is.
ATTENTION_TABLE = dict.fromkeys(LINEAR_TABLE) | {"ocp": "mxfp8", "hif8": "hifp8"}


def parse(*arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, (QUANTIZATION_FLAGS,))
    return QuantConfig.from_namespace(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("CUSTOM_QUANT_TYPE", raising=False)


def test_every_preset_is_in_the_tables():
    assert set(PRESETS) == set(LINEAR_TABLE)
    assert all(preset.source and preset.differs and preset.title for preset in PRESETS.values())


@pytest.mark.parametrize("name", LINEAR_TABLE)
def test_linear_operands(name):
    fprop, dgrad, wgrad, scale_rule, grad_scale = LINEAR_TABLE[name]
    assert parse("--quant-preset", name).linear(LINEAR, 0, 4).formats() == {
        "fprop": dict(zip("xw", fprop, strict=True)),
        "dgrad": {"dy": dgrad[0], "w": dgrad[1]},
        "wgrad": {"dy": wgrad[0], "x": wgrad[1]},
        "scale_rule": scale_rule,
        "grad_scale": grad_scale,
    }


@pytest.mark.parametrize("name", ATTENTION_TABLE)
def test_attention_operands(name):
    quant = parse("--quant-preset", name).attention(ATTENTION, 0, 4)
    expected = ATTENTION_TABLE[name]
    if expected is None:
        assert quant is None
    else:
        assert {operand for operands in quant.gemms.values() for operand in operands.values()} == {expected}


def test_what_is_given_by_hand_wins_and_the_rest_is_the_presets():
    config = parse(
        *("--quant-preset", "te-mxfp8", "--quant-backward-type", "mxfp8_e5m2", "--quant-scope", "both"),
        *("--quant-skip-last-layers", "1"),
    )
    assert config.linear(LINEAR, 0, 4).formats()["dgrad"] == {"dy": "mxfp8_e5m2", "w": "mxfp8"}
    assert config.attention(ATTENTION, 0, 4).scale_rule == "rceil"
    assert config.linear(LINEAR, 3, 4) is None
    assert parse("--quant-preset", "te-mxfp8", "--quant-type", "mxfp4").linear(LINEAR, 0, 4).gemms["fprop"] == {
        "x": "mxfp4",
        "w": "mxfp4",
    }


def test_a_preset_of_which_nothing_is_left_is_refused():
    with pytest.raises(ValueError, match=r"^--quant-type none leaves nothing of --quant-preset te-mxfp8: leave one of"):
        parse("--quant-preset", "te-mxfp8", "--quant-type", "none")


def test_preset_is_by_hand_and_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    assert parse("--quant-preset", "te-nvfp4").quant_type == "nvfp4"


def test_run_json_names_the_preset_its_source_and_what_it_leaves_out():
    (preset,) = parse("--quant-preset", "te-nvfp4").describe().values()
    assert (preset["name"], preset["source"]) == ("te-nvfp4", PRESETS["te-nvfp4"].source)
    assert "stochastic rounding of dy" in preset["differs"]
    assert preset["overridden"] == {}


def test_run_json_says_what_was_overridden_also_once_the_flags_hold_what_it_came_to():
    flags = ("--quant-type", "mxfp4", "--quant-scope", "linear", "--quant-operands", "wgrad")
    parser = argparse.ArgumentParser()
    add_flags(parser, (QUANTIZATION_FLAGS,))
    namespace = parser.parse_args(("--quant-preset", "te-mxfp8", *flags))
    config = QuantConfig.from_namespace(namespace)
    expected = {"quant_type": "mxfp4", "quant_operands": ["wgrad"]}
    assert config.describe()["preset"]["overridden"] == expected
    config.write_back(namespace)
    assert QuantConfig.from_namespace(namespace).describe()["preset"]["overridden"] == expected


def test_unknown_preset_is_answered_with_the_allowed_ones():
    with pytest.raises(argparse.ArgumentError, match=r"invalid choice: 'mx'.*'ocp'.*'hif8'"):
        parse("--quant-preset", "mx")
    with pytest.raises(ValueError, match="--quant-preset 'mx' is not allowed: choose from ocp, te-mxfp8"):
        QuantConfig.from_namespace(argparse.Namespace(quant_preset="mx"))


@pytest.mark.parametrize("name", PRESETS)
def test_the_docs_give_the_flags_that_do_the_same(name):
    lines = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith(f"| `{name}` | {PRESETS[name].title} |"))
    by_flags, by_preset = parse(*row.split("`")[3].split()), parse("--quant-preset", name)
    assert replace(by_flags, preset=name) == by_preset
    assert any(line.startswith(f"| `{name}` | {PRESETS[name].source} | {PRESETS[name].differs[0]}") for line in lines)
