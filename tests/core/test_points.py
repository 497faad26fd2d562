"""Further capture points: each shows what an independent computation gives, once, and changes no bit of training."""

import math
from collections import Counter

import pytest
import torch
from torch.nn import functional

from megatron.core.instrumentation import instrument
from megatron.core.points import POINTS, Axes
from megatron.quantscope.capture import TensorFilter
from megatron.quantscope.flags.capture import POINTS as POINT_NAMES
from megatron.quantscope.formats import fake_quantize
from megatron.quantscope.gemm import QuantConfig, attention_blocks

LAYERS, SEQUENCE, HEADS, GROUPS, HEAD_DIM, VOCABULARY = 2, 32, 4, 2, 16, 128
IDS = (torch.arange(SEQUENCE + 1) * 7 % VOCABULARY)[None]
NORMS_A_LAYER = ("input_layernorm", "pre_mlp_layernorm")
BOTH_ENDS = {("forward", "pre", "input"), ("forward", "post", "output"), ("backward", "pre", "grad_output")}


def run_of(model, session, gradients, quant_type="none"):
    """Show one micro-batch to `session`; {(layer_type, module, operation, tensor_name): tensor} and what it gave."""
    instrument([model], recipe=QuantConfig(quant_type=quant_type), session=session, num_layers=LAYERS)
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    given = gradients(model)
    found = {(row.layer_type, row.module, row.operation, row.tensor_name): tensor for row, tensor in session.rows}
    assert len(found) == len(session.rows)
    return found, given


@pytest.fixture
def shown(build_model, open_session, gradients):
    """`shown(*points, quant_type="none", **overrides)` -> (rows of the session, tensors by key, the model)."""

    def show(*points, quant_type="none", layer_norm=None, **overrides):
        model = build_model(**overrides)
        session = open_session(points=frozenset(points))
        found, _ = run_of(model, session, gradients, quant_type)
        return [row for row, _ in session.rows], found, model

    return show


def rows_at(rows, layer_type):
    """Counter of (module, operation, phase, tensor_name) of one layer type."""
    return Counter((r.module, r.operation, r.phase, r.tensor_name) for r in rows if r.layer_type == layer_type)


def watched(model):
    """Outputs of every module of an uninstrumented twin, and their gradients, by hooks of this test's own."""
    outputs, handles = {}, []
    for name, module in model.named_modules():

        def keep(_, args, result, name=name):
            result = result[0] if isinstance(result, tuple) else result
            if not torch.is_tensor(result):
                return
            outputs[name] = (result, result.detach().clone())  # upstream subtracts the maximum of the logits in place
            if result.requires_grad:
                result.retain_grad()

        handles.append(module.register_forward_hook(keep))
    model(IDS[:, :-1], torch.arange(SEQUENCE)[None], None, labels=IDS[:, 1:]).mean().backward()
    for handle in handles:
        handle.remove()
    return {name: (value, result.grad) for name, (result, value) in outputs.items()}


def test_the_table_has_every_point_of_the_flag():
    assert {point.name for point in POINTS} == set(POINT_NAMES)


@pytest.mark.parametrize("point", POINT_NAMES)
def test_a_point_adds_its_own_rows_and_nothing_else(shown, point):
    plain, _, _ = shown()
    rows, _, _ = shown(point)
    (layer_type,) = {p.layer_type for p in POINTS if p.name == point}
    extra = [row for row in rows if row.layer_type == layer_type and layer_type != "attention"]
    extra += [row for row in rows if row.tensor_name == "attention_probs"]
    assert extra
    assert len(rows) == len(plain) + len(extra)
    assert all(row.component == p.component for row in extra for p in POINTS if p.name == point)
    assert all(row.gemm == ("context" if point == "attention_probs" else None) for row in extra)
    assert all(row.formats == {} and row.shard == () and row.stage == "complete" for row in extra)


def test_nothing_is_attached_when_no_point_is_asked_for(build_model, open_session):
    def hooks(model):
        return {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}

    model = build_model()
    before = hooks(model)
    assert instrument([model], recipe=None, session=open_session(), num_layers=LAYERS) == 5 * LAYERS
    assert hooks(model) == before
    everything = open_session(points=frozenset(POINT_NAMES))
    assert instrument([model], recipe=None, session=everything, num_layers=LAYERS) == 9 * LAYERS + 2
    once = hooks(model)
    instrument([model], recipe=None, session=everything, num_layers=LAYERS)
    assert hooks(model) == once != before
    instrument([model], recipe=None, session=None, num_layers=LAYERS)
    assert hooks(model) == before


@pytest.mark.parametrize("quant_type", ["none", "mxfp8"])
@pytest.mark.parametrize(
    "overrides", [{}, {"add_bias_linear": True}, {"attention_dropout": 0.1, "hidden_dropout": 0.1}]
)
def test_all_points_together_change_no_bit(build_model, open_session, gradients, quant_type, overrides):
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(5)
    model = build_model(**overrides)
    instrument([model], recipe=QuantConfig(quant_type=quant_type), session=None, num_layers=LAYERS)
    loss, expected = gradients(model)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    session = open_session(points=frozenset(POINT_NAMES))
    _, (kept_loss, found) = run_of(build_model(**overrides), session, gradients, quant_type)
    assert torch.equal(loss, kept_loss)
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_the_residual_stream_enters_each_layer_and_leaves_the_last(shown, build_model):
    rows, found, _ = shown("residual")
    last = f"decoder.layers.{LAYERS - 1}"
    assert rows_at(rows, "residual") == Counter(
        [(f"decoder.layers.{i}", "forward", "pre", "input") for i in range(LAYERS)]
        + [(f"decoder.layers.{i}", "backward", "pre", "grad_output") for i in range(LAYERS)]
        + [(last, "forward", "post", "output")]
    )
    twin = watched(build_model())
    entering = ["embedding", *(f"decoder.layers.{i}" for i in range(LAYERS))]
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}"
        assert torch.equal(found["residual", name, "forward", "input"], twin[entering[layer]][0])
        assert torch.equal(found["residual", name, "backward", "grad_output"], twin[name][1])
    assert torch.equal(found["residual", last, "forward", "output"], twin[last][0])
    assert {row.layer_idx for row in rows if row.layer_type == "residual"} == set(range(LAYERS))


def test_norms(shown, build_model):
    rows, found, model = shown("norm", "residual")
    names = [f"decoder.layers.{i}.{norm}" for i in range(LAYERS) for norm in NORMS_A_LAYER] + [
        "decoder.final_layernorm"
    ]
    assert rows_at(rows, "norm") == Counter((name, *row) for name in names for row in BOTH_ENDS)
    twin = watched(build_model())
    for name in names:
        x, weight = found["norm", name, "forward", "input"], model.get_submodule(name).weight.detach()
        expected = functional.rms_norm(x, weight.shape, weight, model.config.layernorm_epsilon)
        assert torch.equal(found["norm", name, "forward", "output"], expected)
        assert torch.equal(found["norm", name, "backward", "grad_output"], twin[name][1])
    for i in range(LAYERS):
        layer = f"decoder.layers.{i}"
        stream = found["residual", layer, "forward", "input"]
        assert torch.equal(found["norm", f"{layer}.input_layernorm", "forward", "input"], stream)
        normed = found["norm", f"{layer}.input_layernorm", "forward", "output"]
        assert torch.equal(found["linear", f"{layer}.self_attention.linear_qkv", "forward", "input"], normed)
        gradient = found["norm", f"{layer}.pre_mlp_layernorm", "backward", "grad_output"]
        assert torch.equal(found["linear", f"{layer}.mlp.linear_fc1", "backward", "grad_input"], gradient)
    outside = [row.layer_idx for row in rows if row.module == "decoder.final_layernorm"]
    assert outside == [None] * len(BOTH_ENDS)


def test_norms_of_queries_and_keys(one_rank, open_session, gradients, build_model):
    """No norm of heads without --qk-layernorm; with it one a layer for q and one for k."""
    model = build_model()
    for layer in model.decoder.layers:
        layer.self_attention.q_layernorm = torch.nn.RMSNorm(HEAD_DIM)
        layer.self_attention.k_layernorm = torch.nn.RMSNorm(HEAD_DIM)
    session = open_session(points=frozenset({"norm"}))
    found, _ = run_of(model, session, gradients)
    for i in range(LAYERS):
        for name, heads in (("q_layernorm", HEADS), ("k_layernorm", GROUPS)):
            module = f"decoder.layers.{i}.self_attention.{name}"
            x = found["norm", module, "forward", "input"]
            assert x.shape == (SEQUENCE, 1, heads, HEAD_DIM)
            assert torch.equal(found["norm", module, "forward", "output"], functional.rms_norm(x, (HEAD_DIM,)))
            assert found["norm", module, "backward", "grad_output"].abs().max() > 0


@pytest.mark.parametrize("bias", [False, True])
def test_activations(build_model, open_session, gradients, bias):
    model = build_model(add_bias_linear=bias)
    for layer in model.decoder.layers:
        if bias:
            torch.nn.init.normal_(layer.mlp.linear_fc1.bias)
    session = open_session(points=frozenset({"activation"}))
    found, _ = run_of(model, session, gradients)
    names = [f"decoder.layers.{i}.mlp" for i in range(LAYERS)]
    kept = rows_at([row for row, _ in session.rows], "activation")
    assert kept == Counter((name, "forward", "pre", "input") for name in names)
    for name in names:
        x = found["activation", name, "forward", "input"]
        product = found["linear", f"{name}.linear_fc1", "forward", "output"]
        assert torch.equal(x, product + model.get_submodule(name).linear_fc1.bias if bias else product)
        gate, up = x.chunk(2, dim=-1)
        assert torch.equal(found["linear", f"{name}.linear_fc2", "forward", "input"], functional.silu(gate) * up)


def test_logits(shown, build_model):
    """They are kept without naming output_layer in the filter, which keeps the head's GEMM out."""
    rows, found, model = shown("logits", "norm")
    assert rows_at(rows, "logits") == Counter(
        [("output_layer", "forward", "post", "output"), ("output_layer", "backward", "pre", "grad_output")]
    )
    assert not any(row.module == "output_layer" for row in rows if row.layer_type == "linear")
    logits = found["logits", "output_layer", "forward", "output"]
    x = found["norm", "decoder.final_layernorm", "forward", "output"]
    assert torch.equal(logits, x @ model.output_layer.weight.detach().t())
    twin = watched(build_model())["output_layer"]
    assert torch.equal(found["logits", "output_layer", "backward", "grad_output"], twin[1])
    of_labels = functional.one_hot(IDS[:, 1:].t(), VOCABULARY)
    torch.testing.assert_close(twin[1], (torch.softmax(logits, -1) - of_labels) / SEQUENCE)


def test_logits_beside_the_gemm_of_the_head(build_model, open_session, gradients):
    session = open_session(points=frozenset({"logits"}), filter=TensorFilter.parse(["modules=output_layer"]))
    found, _ = run_of(build_model(), session, gradients)
    assert torch.equal(
        found["logits", "output_layer", "forward", "output"], found["linear", "output_layer", "forward", "output"]
    )


def probabilities_of(query, key, formats=None):
    """Causal softmax of one sample from q [s, 1, heads, d] and k [s, 1, groups, d], one head at a time."""
    scores = []
    for head in range(HEADS):
        q, k = query[:, 0, head], key[:, 0, head * GROUPS // HEADS]
        if formats is not None:
            q, k = (fake_quantize(x, formats[operand]) for x, operand in ((q, "q"), (k, "k")))
        scores.append((q @ k.t()) / math.sqrt(HEAD_DIM))
    hidden = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return torch.softmax(torch.stack(scores).masked_fill(hidden, -math.inf), -1)[None]


@pytest.mark.parametrize("quant_type", ["none", "bf16", "mxfp8"])
@pytest.mark.parametrize("block_elements", [1 << 20, 64])
def test_attention_probabilities(shown, build_model, monkeypatch, quant_type, block_elements):
    """Of upstream's softmax, and of the quantised one, which computes blocks (64: of 32 rows, each head by itself)."""
    monkeypatch.setattr(attention_blocks, "CPU_BLOCK_ELEMENTS", block_elements)
    monkeypatch.setattr(attention_blocks, "ROW_MULTIPLE", 8 if block_elements == 64 else 32)
    rows, found, _ = shown("attention_probs", quant_type=quant_type)
    for i in range(LAYERS):
        module = f"decoder.layers.{i}.self_attention.core_attention"
        probabilities = found["attention", module, "forward", "attention_probs"]
        assert probabilities.shape == (1, HEADS, SEQUENCE, SEQUENCE)
        query, key = (found["attention", module, "forward", name] for name in ("query", "key"))
        formats = None if quant_type == "none" else {"q": quant_type, "k": quant_type}
        torch.testing.assert_close(probabilities, probabilities_of(query, key, formats), rtol=1e-5, atol=1e-7)
        assert probabilities.triu(1).count_nonzero() == 0
    named = [row for row in rows if row.tensor_name == "attention_probs"]
    assert [(row.layer_idx, row.component, row.phase) for row in named] == [(0, "FA", "post"), (1, "FA", "post")]


def test_attention_probabilities_are_those_of_the_softmax(shown, build_model):
    _, found, _ = shown("attention_probs")
    twin = watched(build_model())
    for i in range(LAYERS):
        module = f"decoder.layers.{i}.self_attention.core_attention"
        expected = twin[f"{module}.scale_mask_softmax"][0]
        assert torch.equal(found["attention", module, "forward", "attention_probs"], expected)


@pytest.mark.parametrize("quant_type", ["none", "bf16"])
@pytest.mark.parametrize("scaled_by_layer", [False, True])
def test_attention_says_its_head_dim_and_what_scores_are_multiplied_by(shown, quant_type, scaled_by_layer):
    if scaled_by_layer and quant_type != "none":
        pytest.skip("quantised attention refuses it")
    options = {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True} if scaled_by_layer else {}
    rows, found, _ = shown("attention_probs", quant_type=quant_type, **options)
    of_attention = [row for row in rows if row.layer_type == "attention"]
    assert {(row.tensor_name == "attention_probs") for row in of_attention} == {True, False}
    assert {row.head_dim for row in of_attention} == {found_query(found).shape[-1]}
    for row in of_attention:
        assert row.softmax_scale == pytest.approx(found_query(found).shape[-1] ** -0.5)
    others = [row for row in rows if row.layer_type != "attention"]
    assert {(row.head_dim, row.softmax_scale) for row in others} == {(None, None)}


def found_query(found):
    """The query of the first layer."""
    return found["attention", "decoder.layers.0.self_attention.core_attention", "forward", "query"]


def test_attention_probabilities_come_before_dropout(shown):
    _, found, _ = shown("attention_probs", quant_type="mxfp8", attention_dropout=0.5)
    for i in range(LAYERS):
        module = f"decoder.layers.{i}.self_attention.core_attention"
        sums = found["attention", module, "forward", "attention_probs"].sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_the_filter_applies(build_model, open_session, gradients):
    words = ["layers=1", "tensors=grad_output", "operations=backward"]
    session = open_session(points=frozenset(POINT_NAMES), filter=TensorFilter.parse(words))
    run_of(build_model(), session, gradients)
    kept = [row for row, _ in session.rows if row.layer_type not in ("linear", "attention")]
    assert {(row.layer_idx, row.operation, row.tensor_name) for row in kept} == {(1, "backward", "grad_output")}
    assert {row.layer_type for row in kept} == {"residual", "norm"}


TP, CP = {"over": "tp"}, {"over": "cp", "order": "zigzag"}
SLICES = {"over": "tp", "dim": 0}
EXPECTED_SHARDS = {
    ("residual", "decoder.layers.0"): [SLICES, CP | {"dim": 0}],
    ("norm", "decoder.layers.0.input_layernorm"): [SLICES, CP | {"dim": 0}],
    ("norm", "decoder.final_layernorm"): [SLICES, CP | {"dim": 0}],
    ("activation", "decoder.layers.0.mlp"): [TP | {"dim": -1, "pieces": 2}, CP | {"dim": 0}],
    ("logits", "output_layer"): [TP | {"dim": -1}, CP | {"dim": 0}],
    ("attention_probs", "decoder.layers.0.self_attention.core_attention"): [TP | {"dim": 1}, CP | {"dim": 2}],
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("over", [("tp",), ("cp",), ("tp", "cp")])
def test_shards(build_model, open_session, gradients, monkeypatch, over, sequence_parallel):
    sizes = {"tensor_parallel": 1 + ("tp" in over), "context_parallel": 1 + ("cp" in over)}
    axes = Axes(**sizes, sequence_parallel=sequence_parallel)
    monkeypatch.setattr(Axes, "of", classmethod(lambda *_: axes))
    session = open_session(points=frozenset(POINT_NAMES))
    run_of(build_model(), session, gradients)
    for (kind, module), splits in EXPECTED_SHARDS.items():
        expected = [s for s in splits if s["over"] in over and (sequence_parallel or s is not SLICES)]
        rows = [row for row, _ in session.rows if row.module == module and kind in (row.layer_type, row.tensor_name)]
        assert rows
        for row in rows:
            assert [dict(split) for split in row.shard] == expected, (row.module, row.tensor_name)
