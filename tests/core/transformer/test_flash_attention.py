"""`FlashAttention` against a float64 reference and upstream's unfused attention, and what is captured of it."""

import copy
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.core.context_parallel import share_of
from megatron.core.instrumentation import instrument
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import flash_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.flash_attention import FlashAttention
from megatron.quantscope.gemm import QuantConfig

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 48, 2, 4, 2, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAYERS = 2


@pytest.fixture
def build(build_model):
    """`build(cls, **overrides)` -> one attention of a small model's configuration."""

    def make(cls, *, mask=AttnMaskType.causal, **overrides):
        config = copy.copy(build_model().config)
        for name, value in overrides.items():
            setattr(config, name, value)
        return cls(config, 1, mask, "self")

    return make


def operands(dtype=torch.float32, heads=HEADS, groups=GROUPS):
    generator = torch.Generator().manual_seed(5)
    sizes = ((LENGTH, BATCH, count, WIDTH) for count in (heads, groups, groups))
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def reference(query, key, value, *, causal=True):
    """softmax(q kT / sqrt(d)) v in float64: [s_q, b, heads * d]; the last query sees every key."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.size(2) // key.size(2), dim=2) for tensor in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(WIDTH)
    if causal:
        hidden = torch.ones(query.size(0), key.size(0), dtype=torch.bool).triu(1 + key.size(0) - query.size(0))
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(-2)


def with_gradients(result, inputs):
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
    return [result, *torch.autograd.grad(result, inputs, weights)]


def assert_close(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_result_and_gradients_are_those_of_the_formula(build, dtype, causal):
    module = build(FlashAttention, mask=AttnMaskType.causal if causal else AttnMaskType.no_mask)
    q, k, v = operands(dtype)
    found = with_gradients(module(q, k, v, None), (q, k, v))
    assert found[0].shape == (LENGTH, BATCH, HEADS * WIDTH)
    assert_close(found, with_gradients(reference(q, k, v, causal=causal), (q, k, v)), dtype)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_it_agrees_with_unfused_attention(build, heads, groups):
    q, k, v = operands(heads=heads, groups=groups)
    flash, unfused = (
        with_gradients(build(cls, num_query_groups=groups)(q, k, v, None), (q, k, v))
        for cls in (FlashAttention, DotProductAttention)
    )
    assert_close(flash, unfused, torch.float32)


def test_scores_are_scaled_by_the_softmax_scale_whatever_upstream_does_with_the_layer_number(build):
    q, k, v = operands()
    found = build(FlashAttention, apply_query_key_layer_scaling=True)(q, k, v, None)
    torch.testing.assert_close(found.double(), reference(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_context_parallelism_has_its_share_of_the_result(build, monkeypatch, rank, causal):
    q, k, v = operands()
    whole = {id(tensor): tensor for tensor in (k, v)}
    monkeypatch.setattr(flash_attention, "gather_sequence", lambda tensor, group: whole[id(tensor)])
    module = build(FlashAttention, mask=AttnMaskType.causal if causal else AttnMaskType.no_mask)
    module.config.context_parallel_size = 2
    module.cp_group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    share = {"dim": 0, "rank": rank, "ranks": 2}
    found = with_gradients(module(share_of(q, **share), k, v, None), (q, k, v))
    assert_close(found, with_gradients(share_of(reference(q, k, v, causal=causal), **share), (q, k, v)), torch.float32)


def test_the_package_is_given_its_own_layout(monkeypatch):
    """flash-attn takes [b, s, heads, d], and aligns the causal mask to the last query and key."""
    calls = []

    def flash_attn_func(q, k, v, *, dropout_p, softmax_scale, causal):
        calls.append((dropout_p, softmax_scale, causal))
        swapped = (tensor.transpose(0, 1) for tensor in (q, k, v))
        return reference(*swapped, causal=causal).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v = operands()
    found = flash_attention._by_package(q, k, v, causal=True, dropout=0.5, scale=0.25)
    assert found.shape == (LENGTH, BATCH, HEADS, WIDTH)
    torch.testing.assert_close(found.flatten(-2), reference(q, k, v))
    assert calls == [(0.5, 0.25, True)]


@pytest.mark.parametrize(
    ("mask", "options", "name"),
    [
        (torch.zeros(1, 1, 1, 1, dtype=torch.bool), {}, "attention_mask"),
        (None, {"attention_bias": torch.zeros(1)}, "attention_bias"),
        (None, {"packed_seq_params": PackedSeqParams()}, "packed_seq_params"),
    ],
)
def test_what_the_kernel_does_not_have_is_refused_when_called(build, mask, options, name):
    q, k, v = operands()
    with pytest.raises(RuntimeError, match=f"^flash attention does not support {name}$"):
        build(FlashAttention)(q, k, v, mask, **options)


def test_a_sliding_window_is_refused(build):
    with pytest.raises((ValueError, AssertionError), match=r"(?i)sliding window"):  # 0.14 asserts it itself
        build(FlashAttention, window_size=(4, 0))


@pytest.fixture
def flash_model(build_model):
    """A small model with flash attention, and weights of its own."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = FlashAttention
    plain = build_model()
    model = GPTModel(plain.config, spec, vocab_size=128, max_sequence_length=32, position_embedding_type="rope")
    model.load_state_dict(plain.state_dict())
    return model


def test_a_model_with_it_is_the_model_without(flash_model, build_model, gradients):
    (loss, found), (expected_loss, expected) = gradients(flash_model), gradients(build_model())
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_capture_changes_no_bit_and_keeps_every_tensor(flash_model, gradients, open_session):
    loss, expected = gradients(flash_model)
    session = open_session()
    instrument([flash_model], recipe=None, session=session, num_layers=LAYERS)
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    kept_loss, found = gradients(flash_model)
    session.end_iteration({})
    assert torch.equal(loss, kept_loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    rows = {
        (row.operation, row.phase, row.tensor_name): (row, tensor)
        for row, tensor in session.rows
        if row.module == "decoder.layers.1.self_attention.core_attention"
    }
    q, k, v = (rows["forward", "pre", name][1].requires_grad_() for name in ("query", "key", "value"))
    output, dy = rows["forward", "post", "output"], rows["backward", "pre", "grad_output"][1]
    assert (output[0].head_dim, output[0].softmax_scale) == (WIDTH, pytest.approx(WIDTH**-0.5))
    by_hand = reference(q, k, v)
    torch.testing.assert_close(output[1].double(), by_hand, rtol=1e-5, atol=1e-6)
    for name, gradient in zip(
        ("query", "key", "value"), torch.autograd.grad(by_hand, (q, k, v), dy.double()), strict=True
    ):
        torch.testing.assert_close(rows["backward", "post", f"grad_{name}"][1], gradient, rtol=1e-3, atol=1e-7)
    assert len(rows) == 8


def test_quantised_attention_is_refused_by_name(flash_model):
    with pytest.raises(ValueError, match="quantised attention runs its own kernel, and --attention-backend flash anot"):
        instrument([flash_model], recipe=QuantConfig(quant_type="mxfp8"), session=None, num_layers=LAYERS)


def test_quantised_linear_layers_go_with_it(flash_model):
    recipe = QuantConfig(quant_type="mxfp8", scope="linear")
    assert instrument([flash_model], recipe=recipe, session=None, num_layers=LAYERS) == 4 * LAYERS
