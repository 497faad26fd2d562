"""Recipe files on a real model: which module becomes what, and a quantised LM head, tied to the embedding or not."""

from pathlib import Path

import pytest
import torch

from megatron.core.instrumentation import instrument
from megatron.core.resolution import resolve
from megatron.quantscope.capture import TensorFilter
from megatron.quantscope.columns import aligned
from megatron.quantscope.formats import fake_quantize
from megatron.quantscope.gemm import QuantConfig
from megatron.quantscope.gemm.recipe_file import read_recipe
from megatron.quantscope.gemm.resolved import table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "quantization.md"
LAYERS = 2


@pytest.fixture
def recipe(tmp_path):
    """`recipe(text)` -> the configuration of a run with a file of this text."""

    def read(text):
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return QuantConfig(rules=read_recipe(str(path)))

    return read


def formats_of(module, gemm="fprop"):
    return None if module.formats is None else tuple(module.formats[gemm].values())


def test_every_module_is_resolved_once_and_by_its_place(build_model, recipe):
    config = recipe(
        "default: mxfp4\nrules:\n- {modules: '*.0.*.linear_fc1', format: hifp8}\n- {layers: -1, format: none}\n"
    )
    modules = resolve(config, [build_model()], LAYERS)
    short = {module.name.removeprefix("decoder.layers."): module for module in modules}
    assert {name: formats_of(module) for name, module in short.items() if "core_attention" not in name} == {
        "0.self_attention.linear_proj": ("mxfp4", "mxfp4"),
        "0.self_attention.linear_qkv": ("mxfp4", "mxfp4"),
        "0.mlp.linear_fc1": ("hifp8", "hifp8"),
        "0.mlp.linear_fc2": ("mxfp4", "mxfp4"),
        **dict.fromkeys(["1.self_attention.linear_proj", "1.self_attention.linear_qkv"]),
        **dict.fromkeys(["1.mlp.linear_fc1", "1.mlp.linear_fc2", "output_layer"]),
    }
    assert formats_of(short["0.self_attention.core_attention"], "context") == ("mxfp4", "mxfp4")
    assert short["1.self_attention.core_attention"].formats is None
    assert modules[-1].name == "output_layer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{modules: linear_fc3, format: mxfp8}]", "r.yaml:1: modules 'linear_fc3' matches no module"),
        ("rules: [{layers: 2, format: mxfp8}]", "r.yaml:1: layers 2 is not allowed: the model has layers 0-1"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(build_model, recipe, text, message):
    with pytest.raises(ValueError, match=message):
        resolve(recipe(text), [build_model()], LAYERS)


def test_the_docs_show_what_the_file_in_them_prints(build_model, recipe):
    page = DOCS.read_text(encoding="utf-8")
    file, printed = page.partition("```yaml\n")[2].split("```")[0], page.partition("```\nmodules ")[2].split("```")[0]
    modules = resolve(recipe(file), [build_model(num_layers=12)], 12)
    assert aligned(table(modules, 12)) == f"modules {printed}".rstrip("\n")


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_head_computes_what_its_operands_give(build_model, recipe, open_session, gradients, tied):
    """In fp32 upstream's loss writes into the logits, so the output must not be a view that autograd watches."""
    model = build_model()
    if tied:
        model = retied(model)
    config = recipe("rules: [{modules: output_layer, format: mxfp8, backward_format: mxfp8_e5m2, scale_rule: rceil}]")
    session = open_session(filter=TensorFilter(modules=("output_layer",)))
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    instrument([model], recipe=config, session=session, num_layers=LAYERS)
    gradients(model)
    rows = {metadata.tensor_name: tensor for metadata, tensor in session.rows}
    x, w, dy = (rows[name].flatten(0, -2) for name in ("input", "weight", "grad_output"))

    def q(tensor, fmt, axis):
        return fake_quantize(tensor, fmt, axis=axis, scale_rule="rceil", backend="reference").double()

    for name, product in (
        ("output", q(x, "mxfp8", 1) @ q(w, "mxfp8", 1).T),
        ("grad_input", q(dy, "mxfp8_e5m2", 1) @ q(w, "mxfp8", 0)),
        ("grad_weight", q(dy, "mxfp8_e5m2", 0).T @ q(x, "mxfp8", 0)),
    ):
        torch.testing.assert_close(rows[name].flatten(0, -2).double(), product, rtol=1e-4, atol=1e-6)
    embedding = model.embedding.word_embeddings.weight
    assert torch.equal(w, embedding) is tied


def retied(model):
    """A model like this one whose LM head uses the embedding's weight."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        model.config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
