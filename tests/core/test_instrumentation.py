"""Probes: attached where they belong, absent where nothing is asked for, and exact where nothing is quantised."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.instrumentation import instrument
from megatron.core.kinds import KINDS
from megatron.core.probe import Probe
from megatron.core.shards import Axes
from megatron.quantscope.gemm import QuantConfig

MODULES_A_LAYER = 5  # linear_qkv, core_attention, linear_proj, linear_fc1, linear_fc2
LAYERS = 2


class EveryTensor:
    """A site that keeps everything, in memory."""

    def __init__(self):
        self.rows = []

    def tap(self):
        return lambda operation, phase, name, tensor: self.rows.append(
            (operation, phase, name, tensor.detach().clone())
        )


class Session:
    """Records what `instrument` asks of a capture session."""

    def __init__(self):
        self.config = SimpleNamespace(points=frozenset())
        self.sites = {}
        self.requests = {}

    def site(self, *, module, **request):
        if module == "output_layer":
            return None
        self.requests[module] = request
        return self.sites.setdefault(module, EveryTensor())


def recipe(**settings):
    return QuantConfig(**({"quant_type": "mxfp8"} | settings))


def probed(model):
    found = {}
    for name, module in model.named_modules():
        bound = vars(module).get("_forward_impl") or vars(module).get("forward")
        if bound is not None:
            found[name] = bound.args[1]
    return found


def test_nothing_is_attached_when_nothing_is_asked_for(build_model):
    model = build_model()
    assert instrument([model], recipe=None, session=None, num_layers=LAYERS) == 0
    assert probed(model) == {}


def test_none_attaches_nothing(build_model):
    assert instrument([build_model()], recipe=recipe(quant_type="none"), session=None, num_layers=LAYERS) == 0


@pytest.mark.parametrize(
    ("settings", "modules_a_layer", "layers"),
    [({}, 5, 2), ({"scope": "linear"}, 4, 2), ({"scope": "attention"}, 1, 2), ({"skip_first_layers": 1}, 5, 1)],
)
def test_the_recipe_decides_what_is_probed(build_model, settings, modules_a_layer, layers):
    model = build_model()
    count = instrument([model], recipe=recipe(**settings), session=None, num_layers=LAYERS)
    assert count == modules_a_layer * layers == len(probed(model))
    assert not any(name.startswith(("output_layer", "embedding")) for name in probed(model))


def test_wrapped_models_keep_bare_names(build_model):
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Module()
    wrapper.module.module = build_model()
    session = Session()
    assert instrument([wrapper], recipe=None, session=session, num_layers=LAYERS) == MODULES_A_LAYER * LAYERS
    assert "decoder.layers.1.self_attention.core_attention" in session.sites
    assert session.requests["decoder.layers.1.mlp.linear_fc2"]["layer_idx"] == 1


def test_names_and_layers_are_those_of_the_whole_model(build_model):
    """The second pipeline stage calls its first layer 0; in the whole model it is layer 2."""
    model = build_model()
    for layer in model.decoder.layers:
        layer.layer_number += LAYERS
    session = Session()
    instrument([model], recipe=None, session=session, num_layers=2 * LAYERS)
    assert {request["layer_idx"] for request in session.requests.values()} == {2, 3}
    assert "decoder.layers.2.self_attention.linear_qkv" in session.sites
    assert not any(".layers.0." in name for name in session.sites)


def test_watching_without_quantising_changes_no_bit(build_model, gradients):
    plain = gradients(build_model())
    model, session = build_model(), Session()
    instrument([model], recipe=None, session=session, num_layers=LAYERS)
    loss, grads = gradients(model)
    assert torch.equal(loss, plain[0])
    for name, grad in grads.items():
        assert torch.equal(grad, plain[1][name]), name


def test_a_watched_module_shows_each_tensor_once_and_in_order(build_model, gradients):
    for quant_type in (None, "mxfp8"):
        model, session = build_model(), Session()
        instrument([model], recipe=quant_type and recipe(), session=session, num_layers=LAYERS)
        _, grads = gradients(model)
        rows = session.sites["decoder.layers.0.mlp.linear_fc1"].rows
        assert [row[:3] for row in rows] == [
            ("forward", "pre", "input"),
            ("forward", "pre", "weight"),
            ("forward", "post", "output"),
            ("backward", "pre", "grad_output"),
            ("backward", "pre", "weight"),
            ("backward", "post", "grad_input"),
            ("backward", "post", "grad_weight"),
        ]
        assert torch.equal(rows[-1][3], grads["decoder.layers.0.mlp.linear_fc1.weight"])
        rows = session.sites["decoder.layers.0.self_attention.core_attention"].rows
        assert [row[2] for row in rows[:5]] == ["query", "key", "value", "output", "grad_output"]
        assert {row[2]: tuple(row[3].shape) for row in rows[5:]} == {
            "grad_query": (32, 1, 4, 16),
            "grad_key": (32, 1, 2, 16),
            "grad_value": (32, 1, 2, 16),
        }


def test_quantising_changes_the_loss_a_little(build_model, gradients):
    plain, _ = gradients(build_model())
    model = build_model()
    instrument([model], recipe=recipe(quant_type="mxfp4"), session=None, num_layers=LAYERS)
    loss, _ = gradients(model)
    assert loss != plain
    assert abs(loss - plain) < 0.1 * plain


def test_attention_variants_that_can_not_be_quantised_are_refused_by_name(build_model):
    model = build_model(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)
    with pytest.raises(ValueError, match="apply_query_key_layer_scaling; use --quant-scope linear"):
        instrument([model], recipe=recipe(), session=None, num_layers=LAYERS)
    instrument([model], recipe=recipe(scope="linear"), session=None, num_layers=LAYERS)


def test_fused_accumulation_goes_to_main_grad(build_model, gradients, monkeypatch):
    """The CUDA extension's contract, played by torch: dyT x is added to main_grad, autograd gets a placeholder."""
    from megatron.core.tensor_parallel import layers

    class Kernel:
        @staticmethod
        def wgrad_gemm_accum_fp32(x, dy, main_grad):
            main_grad.add_(dy.t() @ x)

        wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

    _, expected = gradients(build_model())
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", Kernel, raising=False)
    model, session = build_model(), Session()
    instrument([model], recipe=None, session=session, num_layers=LAYERS)
    name = "decoder.layers.0.mlp.linear_fc1"
    layer = model.get_submodule(name)
    layer.gradient_accumulation_fusion = True
    layer.weight.main_grad = torch.ones_like(layer.weight)
    layer.weight.grad_added_to_main_grad = False
    gradients(model)
    assert layer.weight.grad_added_to_main_grad
    torch.testing.assert_close(layer.weight.main_grad, expected[f"{name}.weight"] + 1)
    assert torch.equal(session.sites[name].rows[-1][3], expected[f"{name}.weight"])


def test_the_table_of_kinds_names_captured_tensors_only():
    linear = {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
    attention = {"query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value"}
    for kind in KINDS.values():
        known = linear if kind.layer_type == "linear" else attention
        assert set(kind.layout) - kind.on_request == known
        assert kind.gathered <= known


def test_attaching_again_replaces_the_probe(build_model):
    model = build_model()
    layer = model.decoder.layers[0].mlp.linear_fc1
    kinds = (recipe(), recipe(quant_type="mxfp4"))
    first, second = (Probe(kind.linear("decoder.layers.0.mlp.linear_fc1", 0, LAYERS), None) for kind in kinds)
    layer.attach_probe(first)
    layer.attach_probe(second)
    assert probed(model) == {"decoder.layers.0.mlp.linear_fc1": second}


TP_COLUMNS, TP_ROWS, TP_SUM = {"over": "tp", "dim": 0}, {"over": "tp", "dim": 1}, {"over": "tp", "reduce": "sum"}
TP_HIDDEN, TP_HEADS = {"over": "tp", "dim": -1}, {"over": "tp", "dim": 2}
CP, CP_SUM = {"over": "cp", "dim": 0, "order": "zigzag"}, {"over": "cp", "reduce": "sum"}
GATED = {"pieces": 2}

SHARDS = {
    "self_attention.linear_qkv": {
        "input": [CP],
        "weight": [TP_COLUMNS],
        "output": [TP_HIDDEN, CP],
        "grad_output": [TP_HIDDEN, CP],
        "grad_input": [TP_SUM, CP],
        "grad_weight": [TP_COLUMNS, CP_SUM],
    },
    "mlp.linear_fc1": {
        "input": [CP],
        "weight": [TP_COLUMNS | GATED],
        "output": [TP_HIDDEN | GATED, CP],
        "grad_output": [TP_HIDDEN | GATED, CP],
        "grad_input": [TP_SUM, CP],
        "grad_weight": [TP_COLUMNS | GATED, CP_SUM],
    },
    "mlp.linear_fc2": {
        "input": [TP_HIDDEN, CP],
        "weight": [TP_ROWS],
        "output": [TP_SUM, CP],
        "grad_output": [CP],
        "grad_input": [TP_HIDDEN, CP],
        "grad_weight": [TP_ROWS, CP_SUM],
    },
    "self_attention.core_attention": {
        "query": [TP_HEADS, CP],
        "key": [TP_HEADS, CP],
        "value": [TP_HEADS, CP],
        "output": [TP_HIDDEN, CP],
        "grad_output": [TP_HIDDEN, CP],
        "grad_query": [TP_HEADS, CP],
        "grad_key": [TP_HEADS, CP],
        "grad_value": [TP_HEADS, CP],
        "attention_probs": [{"over": "tp", "dim": 1}, CP | {"dim": 2}],
    },
}


@pytest.mark.parametrize("over", [("tp",), ("cp",), ("tp", "cp")])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_shards_say_how_the_whole_lies_over_the_ranks(build_model, monkeypatch, over, sequence_parallel):
    """Tensor parallel splits come first; axes of one rank are left out; sequence parallelism gathers for the GEMMs."""
    sizes = {"tensor_parallel": 1 + ("tp" in over), "context_parallel": 1 + ("cp" in over)}
    axes = Axes(**sizes, sequence_parallel=sequence_parallel)
    monkeypatch.setattr(Axes, "of", classmethod(lambda *_: axes))
    session = Session()
    instrument([build_model()], recipe=None, session=session, num_layers=LAYERS)
    for name, expected in SHARDS.items():
        present = {key: [split for split in splits if split["over"] in over] for key, splits in expected.items()}
        found = session.requests[f"decoder.layers.1.{name}"]["shards"]
        assert found == {key: splits for key, splits in present.items() if splits}


def test_a_plain_mlp_has_one_piece(build_model, monkeypatch):
    monkeypatch.setattr(Axes, "of", classmethod(lambda *_: Axes(tensor_parallel=2)))
    session = Session()
    model = build_model(gated_linear_unit=False, activation_func=torch.nn.functional.gelu)
    instrument([model], recipe=None, session=session, num_layers=LAYERS)
    assert session.requests["decoder.layers.0.mlp.linear_fc1"]["shards"]["weight"] == [TP_COLUMNS]


def test_one_rank_holds_everything_whole(build_model):
    session = Session()
    instrument([build_model()], recipe=None, session=session, num_layers=LAYERS)
    assert all(request["shards"] == {} for request in session.requests.values())
