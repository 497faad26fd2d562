"""What-if is what training does: operands captured under bf16 and quantised offline, along each use, against the very
tensors that a run with the format hands to its matrix products when its operands are the same.
"""

import pytest
import torch

from megatron.quantscope.analysis.format_errors import Treatment
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.analysis.what_if import as_quantized
from megatron.quantscope.formats import FORMATS
from megatron.quantscope.gemm import attention_passes
from megatron.quantscope.gemm import linear as linear_module
from megatron.quantscope.gemm.attention import attention
from megatron.quantscope.gemm.operands import POW2_AMAX, AttentionQuant, LinearQuant
from tests.quantscope.analysis.conftest import numpy_error

SEQUENCE, SAMPLES, HEADS, GROUPS, HEAD_DIM = 40, 2, 4, 2, 24  # blocks of 32 are ragged, and would cross heads
INPUTS, OUTPUTS = 72, 104
RUNS = [
    ("mxfp8", "floor"), ("mxfp8", "rceil"), ("mxfp4", "floor"), ("mxfp4", "rceil"), ("mxfp6_e2m3", "rceil"),
    ("nvfp4", "floor"), ("hifp8", "floor"), ("fp16", "floor"), ("fp8_e4m3", "floor"), ("fp8_e5m2", "floor"),
]  # fmt: skip
GRADIENTS = ("grad_output",)


def formats_of(kind, name, rule="floor"):
    gemms = {gemm: dict.fromkeys(operands, name) for gemm, operands in kind.GEMMS.items()}
    scale = POW2_AMAX if name in ("fp16", "hifp8") else "none"
    return kind(gemms=gemms, scale_rule=rule, grad_scale=scale)


def treatment_of(name, rule, use, tensor_name):
    block = FORMATS[name].block is not None
    scaled = name in ("fp16", "hifp8") and tensor_name in GRADIENTS
    return Treatment(name, rule, scaled=scaled, use=use if block else 0)


def uneven(*shape, seed, size=1.0):
    numbers = torch.Generator().manual_seed(seed)
    return (
        size * torch.randn(shape, generator=numbers) * torch.exp2(2 * torch.randn(shape, generator=numbers))
    ).bfloat16()


class Products:
    """Stands in for the door to all products: keeps what goes through it."""

    def __init__(self, monkeypatch, module, names):
        self.operands = []
        for name in names:
            monkeypatch.setattr(module, name, self._kept(getattr(module, name)))

    def _kept(self, product):
        def multiply(a, b):
            self.operands.append((a.clone(), b.clone()))
            return product(a, b)

        return multiply


def offline(layer_type, name, tensor, run, use):
    """The operand as what-if quantises it, in the shape of its use."""
    role = role_of(layer_type, name)
    treatment = treatment_of(*run, use, name)
    quantized = as_quantized(tensor, role, treatment, HEAD_DIM)
    if treatment.use == use:
        return quantized
    return role.uses[use].view(quantized.reshape(tensor.shape), HEAD_DIM)[0]  # without blocks there is one for both


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(actual.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


def captured_linear():
    """Operands of one linear layer, as a tap saw them in a run without quantisation."""
    seen = {}
    x = uneven(SEQUENCE, SAMPLES, INPUTS, seed=0).requires_grad_()
    w = uneven(OUTPUTS, INPUTS, seed=1, size=0.02).requires_grad_()
    y = linear_module.linear(x, w, quant=None, tap=lambda *what: seen.__setitem__(what[2], what[3].detach().clone()))
    y.backward(uneven(*y.shape, seed=2, size=1e-6))
    return {name: seen[name] for name in ("input", "weight", "grad_output")}


@pytest.mark.parametrize("run", RUNS, ids="_".join)
def test_linear(run, monkeypatch):
    captured = captured_linear()
    products = Products(monkeypatch, linear_module, ["matmul"])
    x, w = (captured[name].clone().requires_grad_() for name in ("input", "weight"))
    linear_module.linear(x, w, quant=formats_of(LinearQuant, *run)).backward(captured["grad_output"])
    (x_fprop, w_fprop), (dy_dgrad, w_dgrad), (dy_wgrad, x_wgrad) = products.operands
    trained = {
        ("input", 0): x_fprop, ("input", 1): x_wgrad, ("weight", 0): w_fprop.t(), ("weight", 1): w_dgrad,
        ("grad_output", 0): dy_dgrad, ("grad_output", 1): dy_wgrad.t(),
    }  # fmt: skip
    for (name, use), expected in trained.items():
        found = offline("linear", name, captured[name], run, use)
        assert_same_bits(found.reshape(expected.shape), expected)


def captured_attention():
    """Operands of one attention, as a tap saw them in a run of bf16, and the probabilities."""
    seen = {}
    q = uneven(SEQUENCE, SAMPLES, HEADS, HEAD_DIM, seed=3).requires_grad_()
    k, v = (uneven(SEQUENCE, SAMPLES, GROUPS, HEAD_DIM, seed=seed).requires_grad_() for seed in (4, 5))
    o = attention(
        q, k, v, quant=formats_of(AttentionQuant, "none"), softmax_scale=HEAD_DIM**-0.5,
        tap=lambda *what: seen.__setitem__(what[2], what[3].detach().clone()),
    )  # fmt: skip
    o.backward(uneven(*o.shape, seed=6, size=1e-6))
    return {name: seen[name] for name in ("query", "key", "value", "grad_output")}


def by_head(t):
    """[s, b, heads, d] -> [b * heads, s, d]."""
    return t.permute(1, 2, 0, 3).flatten(0, 1)


def repeated(t):
    return by_head(t).repeat_interleave(HEADS // GROUPS, dim=0)


@pytest.mark.parametrize("run", RUNS, ids="_".join)
def test_attention(run, monkeypatch):
    captured, probabilities = captured_attention(), []
    products = Products(monkeypatch, attention_passes, ["matmul", "matmul_unrounded"])
    q, k, v = (captured[name].clone().requires_grad_() for name in ("query", "key", "value"))
    attention(
        q, k, v, quant=formats_of(AttentionQuant, *run), softmax_scale=HEAD_DIM**-0.5,
        show_probabilities=lambda p: probabilities.append(p.clone()),
    ).backward(captured["grad_output"])  # fmt: skip
    (q_scores, k_scores), (p_context, v_context), _, (do_dp, v_dp), (p_dv, do_dv), (_, k_dq), (_, q_dk) = (
        products.operands
    )

    def found(name, use):
        return offline("attention", name, captured[name], run, use)

    assert_same_bits(by_head(found("query", 0)), q_scores)
    assert_same_bits(repeated(found("key", 0)), k_scores.transpose(1, 2))
    assert_same_bits(repeated(found("value", 0)), v_context)
    assert_same_bits(by_head(found("grad_output", 0)), do_dp)
    assert_same_bits(repeated(found("value", 1)), v_dp.transpose(1, 2))
    assert_same_bits(by_head(found("grad_output", 1).unflatten(-1, (HEADS, HEAD_DIM))), do_dv)
    assert_same_bits(repeated(found("key", 1)), k_dq)
    assert_same_bits(by_head(found("query", 1)), q_dk)
    if not FORMATS[run[0]].has_tensor_scale:  # of p such a scale is that of a head
        for use, expected in ((0, p_context), (1, p_dv.transpose(1, 2))):
            p = offline("attention", "attention_probs", probabilities[0], run, use)
            assert_same_bits(p.flatten(0, 1), expected)


@pytest.mark.parametrize("run", RUNS, ids="_".join)
def test_errors_of_the_summary_are_those_of_these_operands(run):
    """Counts one by one in float64; of a scale that is no power of two training rounds the result to bf16 as well."""
    operands = {("linear", name): x for name, x in captured_linear().items()}
    operands |= {("attention", name): x for name, x in captured_attention().items()}
    for (layer_type, name), x in operands.items():
        role = role_of(layer_type, name)
        for use in range(2):
            treatment = treatment_of(*run, use, name)
            summary = summarize(x, role, treatments=[treatment], head_dim=HEAD_DIM)
            found = summary.errors[treatment.name]
            view = role.uses[treatment.use].view(x, HEAD_DIM)[0]
            squares, underflow, lost = numpy_error(view, as_quantized(x, role, treatment, HEAD_DIM))
            exact = not FORMATS[run[0]].has_tensor_scale
            assert found.error_squares == pytest.approx(squares, rel=1e-12 if exact else 0.02)
            assert (found.underflow, found.lost) == (underflow, lost)


def test_blocks_would_cross_heads_without_their_size():
    """The reason why metadata tells it: do [s, b, h * d] cut along its last axis is another tensor."""
    do, role = captured_attention()["grad_output"], role_of("attention", "grad_output")
    known, unknown = (as_quantized(do, role, Treatment("mxfp4"), size).reshape(do.shape) for size in (HEAD_DIM, None))
    assert not torch.equal(known, unknown)
