"""The table at the start of a run, and what run.json keeps."""

from megatron.quantscope.gemm import QuantConfig
from megatron.quantscope.gemm.resolved import ResolvedModule, grouped, ranges, table

NAMES = ("self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj", "mlp.linear_fc1")


def resolved(settings, layers, *, experts=0):
    """`settings(name, layer)` -> QuantConfig's values, for a model of these sizes."""
    names = [*NAMES, *(f"mlp.experts.local_experts.{number}.linear_fc2" for number in range(experts))]
    modules = [(f"decoder.layers.{layer}.{name}", layer) for layer in range(layers) for name in names]
    made = []
    for name, layer in [*modules, ("output_layer", None)]:
        config = QuantConfig(**settings(name, layer))
        kind = config.attention if name.endswith("core_attention") else config.linear
        quant = kind(name, 0, 1)
        made.append(ResolvedModule(name=name, layer_idx=layer, formats=None if quant is None else quant.formats()))
    return made


def test_a_deep_model_has_a_short_table():
    def settings(name, layer):
        if layer in (0, 1, 47):
            return {"quant_type": "bf16"}
        return {} if layer is None else {"quant_type": "mxfp8", "backward_type": "hifp8", "scale_rule": "rceil"}

    assert table(resolved(settings, 48), 48) == [
        ("modules", "layers of 48", "operands", "format", "scale rule", "gradient scale"),
        ("linear_qkv, linear_proj, linear_fc1", "0-1, 47", "x w dy", "bf16", "-", "-"),
        ("core_attention", "0-1, 47", "q k p v do ds", "bf16", "-", "-"),
        ("linear_qkv, linear_proj, linear_fc1", "2-46", "x w", "mxfp8", "rceil", "-"),
        ("", "", "dy", "hifp8", "-", "pow2-amax"),
        ("core_attention", "2-46", "q k p v", "mxfp8", "rceil", "-"),
        ("", "", "do ds", "hifp8", "-", "pow2-amax"),
        ("output_layer", "-", "all", "none", "-", "-"),
    ]


def test_operands_that_differ_by_gemm_are_named_with_it():
    rows = table(resolved(lambda *_: {"quant_type": "mxfp4", "scope": "linear", "operands": ("x", "fprop")}, 1), 1)
    assert [row[2:4] for row in rows[1:3]] == [("fprop.x", "mxfp4"), ("w dy wgrad.x", "none")]


def test_experts_are_one_row_where_they_are_alike_and_named_where_not():
    def alike(name, layer):
        return {"quant_type": "mxfp8" if "experts" in name else "none"}

    def apart(name, layer):
        return {"quant_type": "mxfp8" if any(f".{n}." in name.partition("experts.")[2] for n in (0, 1, 3)) else "none"}

    rows = [row[:2] for row in table(resolved(alike, 2, experts=4), 2)]
    assert ("experts.*.linear_fc2", "0-1") in rows
    rows = [row[:2] for row in table(resolved(apart, 2, experts=4), 2)]
    assert ("experts.0-1, 3.linear_fc2", "0-1") in rows
    assert any("experts.2.linear_fc2" in labels for labels, _ in rows)


def test_run_json_keeps_every_module_by_its_full_name():
    modules = resolved(lambda name, layer: {"quant_type": "mxfp8" if layer == 1 else "none"}, 2)
    kept = grouped(modules)
    by_name = {name: group["formats"] for group in kept for name in group["modules"]}
    assert by_name == {module.name: module.formats for module in modules}
    assert len(kept) == 3  # nothing; linear and attention of layer 1


def test_ranges():
    assert ranges([]) == ""
    assert ranges([7, 0, 1, 2, 5]) == "0-2, 5, 7"
