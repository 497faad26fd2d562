"""What the run's format does to an operand, against sums in float64 over what its GEMM is given."""

import math

import pytest
import torch

from megatron.quantscope.formats import fake_quantize, get_format, measure_format
from megatron.quantscope.gemm import QuantConfig
from megatron.training.reporting import own_format
from megatron.training.reporting.own_format import OperandDamage, measure_operand

SEQUENCE, SAMPLES, FEATURES, HEADS = 40, 2, 48, 3


def linear_formats(**settings):
    return QuantConfig(**settings).linear("decoder.layers.0.mlp.linear_fc1", 0, 4).formats()


def attention_formats(**settings):
    return QuantConfig(**settings).attention("decoder.layers.0.self_attention.core_attention", 0, 4).formats()


def tensor_of(*shape, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator)) * scale
    x.view(-1)[::17] = 0
    return x.to(dtype)


def reference(x, y):
    x, y = x.double(), y.double()
    lost = ~torch.isfinite(y)
    error = (x - y)[~lost].square().sum()
    return OperandDamage(float(x.square().sum()), float(error), int(((y == 0) & (x != 0)).sum()), int(lost.sum()))


def same(found, expected):
    assert (found.underflow, found.lost) == (expected.underflow, expected.lost)
    assert found.signal_squares == pytest.approx(expected.signal_squares, rel=1e-9)
    assert found.error_squares == pytest.approx(expected.error_squares, rel=1e-6)  # differences are those of float32


@pytest.mark.parametrize("quant_type", ["mxfp8", "mxfp4", "nvfp4", "fp8_e4m3", "hifp8", "bf16"])
@pytest.mark.parametrize("name", ["input", "weight"])
def test_operands_of_a_linear_run_along_the_sum(quant_type, name):
    x = tensor_of(SEQUENCE, SAMPLES, FEATURES) if name == "input" else tensor_of(64, FEATURES)
    found = OperandDamage.of(measure_operand(x, "linear", name, linear_formats(quant_type=quant_type)))
    same(found, reference(x, fake_quantize(x, quant_type)))
    independent = measure_format(x, quant_type)
    assert found.underflow == independent.underflow
    assert found.sqnr_db == pytest.approx(independent.sqnr_db, abs=1e-6)


def test_an_operand_that_only_its_second_gemm_has_quantised_is_cut_as_that_one_does():
    formats = linear_formats(quant_type="mxfp4", operands=("dgrad", "wgrad"))
    x, w = tensor_of(SEQUENCE, SAMPLES, FEATURES), tensor_of(64, FEATURES)
    by_token = x.reshape(-1, FEATURES)
    same(
        OperandDamage.of(measure_operand(x, "linear", "input", formats)),
        reference(by_token, fake_quantize(by_token, "mxfp4", axis=0)),
    )
    same(
        OperandDamage.of(measure_operand(w, "linear", "weight", formats)),
        reference(w, fake_quantize(w, "mxfp4", axis=0)),
    )


def test_scale_rule_and_backward_type_count():
    formats = linear_formats(quant_type="mxfp8", backward_type="mxfp4", scale_rule="rceil")
    x = tensor_of(SEQUENCE, SAMPLES, FEATURES)
    for name, fmt in (("input", "mxfp8"), ("grad_output", "mxfp4")):
        expected = reference(x, fake_quantize(x, fmt, scale_rule="rceil"))
        same(OperandDamage.of(measure_operand(x, "linear", name, formats)), expected)


def test_the_scale_of_gradients_counts():
    x = tensor_of(SEQUENCE, SAMPLES, FEATURES, scale=1e-9)
    plain = linear_formats(quant_type="hifp8", grad_scale="none")
    scaled = linear_formats(quant_type="hifp8", grad_scale="pow2-amax")
    of_plain, of_scaled = (OperandDamage.of(measure_operand(x, "linear", "grad_output", f)) for f in (plain, scaled))
    same(of_plain, reference(x, fake_quantize(x, "hifp8")))
    factor = 2.0 ** math.floor(math.log2(get_format("hifp8").full_precision_max / float(x.abs().max())))
    same(of_scaled, reference(x, fake_quantize(x * factor, "hifp8") / factor))
    assert of_scaled.underflow < of_plain.underflow


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("query", (SEQUENCE, SAMPLES, HEADS, FEATURES), -1),
        ("key", (SEQUENCE, SAMPLES, 1, FEATURES), -1),
        ("value", (SEQUENCE, SAMPLES, 1, FEATURES), 0),
    ],
)
def test_operands_of_attention(name, shape, axis):
    x = tensor_of(*shape)
    found = measure_operand(x, "attention", name, attention_formats(quant_type="mxfp4"), head_dim=FEATURES)
    same(OperandDamage.of(found), reference(x, fake_quantize(x, "mxfp4", axis=axis)))


def test_the_gradient_of_attention_is_cut_by_heads():
    x = tensor_of(SEQUENCE, SAMPLES, HEADS * FEATURES)
    found = measure_operand(x, "attention", "grad_output", attention_formats(quant_type="mxfp4"), head_dim=FEATURES)
    by_head = x.reshape(SEQUENCE, SAMPLES, HEADS, FEATURES)
    same(OperandDamage.of(found), reference(by_head, fake_quantize(by_head, "mxfp4")))


@pytest.mark.parametrize(
    ("layer_type", "name", "formats"),
    [
        ("linear", "output", linear_formats(quant_type="mxfp8")),
        ("linear", "grad_weight", linear_formats(quant_type="mxfp8")),
        ("linear", "input", {}),
        ("linear", "grad_output", linear_formats(quant_type="mxfp8", operands=frozenset({"x"}))),
        ("norm", "input", {}),
    ],
)
def test_what_is_not_quantised_has_no_figures(layer_type, name, formats):
    assert measure_operand(tensor_of(SEQUENCE, SAMPLES, FEATURES), layer_type, name, formats) is None


def test_a_format_that_changes_nothing_has_no_figures():
    x = tensor_of(SEQUENCE, SAMPLES, FEATURES, dtype=torch.bfloat16)
    assert measure_operand(x, "linear", "input", linear_formats(quant_type="bf16")) is None


def test_what_overflows_is_lost():
    x = torch.tensor([[1.0, 70000.0, float("nan"), float("inf")]])
    found = OperandDamage.of(measure_operand(x, "linear", "input", linear_formats(quant_type="fp16")))
    assert (found.lost, found.underflow, found.sqnr_db) == (1, 0, -math.inf)
    assert found.signal_squares == 1 + 70000.0**2


def test_damages_add_up():
    formats = linear_formats(quant_type="mxfp4")
    parts = [tensor_of(8, 64), tensor_of(24, 64)]
    whole = OperandDamage.of(measure_operand(torch.cat(parts), "linear", "weight", formats))
    first, second = (OperandDamage.of(measure_operand(part, "linear", "weight", formats)) for part in parts)
    same(first + second, whole)


@pytest.mark.parametrize("quant_type", ["mxfp8", "mxfp4", "nvfp4", "hifp8"])
@pytest.mark.parametrize("name", ["input", "grad_output"])
def test_a_device_finds_the_same(monkeypatch, quant_type, name):
    """The way that CUDA tensors take, on the CPU."""
    x = tensor_of(SEQUENCE, SAMPLES, FEATURES, scale=1e-3)
    formats = linear_formats(quant_type=quant_type)
    on_cpu = OperandDamage.of(measure_operand(x, "linear", name, formats))
    monkeypatch.setattr(own_format, "_measure", lambda *_: pytest.fail("measured on the CPU"))
    monkeypatch.setattr(own_format, "CPU", "nowhere")
    monkeypatch.setattr(own_format, "_SLAB", 1000)
    same(OperandDamage.of(measure_operand(x, "linear", name, formats)), on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["input", "grad_output"])
def test_a_gpu_finds_the_same(name):
    x = tensor_of(SEQUENCE, SAMPLES, FEATURES, dtype=torch.bfloat16)
    formats = linear_formats(quant_type="mxfp4")
    figures = measure_operand(x.cuda(), "linear", name, formats)
    assert figures.is_cuda
    same(OperandDamage.of(figures), OperandDamage.of(measure_operand(x, "linear", name, formats)))
