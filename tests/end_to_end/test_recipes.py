"""Training runs with recipe files: what equals the flags, what the examples do, and patterns over several ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.gemm.module_rules import Hit
from megatron.quantscope.gemm.recipe_file import read_recipe
from tests.end_to_end.conftest import LAYERS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
MODULES = ("self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj")
MODULES += ("mlp.linear_fc1", "mlp.linear_fc2")


def run_info(capture, label):
    return capture.run_info[label]["quantization"]


def collect(train, directory, *flags, ranks=1):
    run = train("--save-tensors", "--tensor-save-dir", directory, "--tensor-filter", "modules=*", *flags, ranks=ranks)
    return run, open_capture(directory)


def test_a_recipe_and_the_flags_that_say_the_same_are_the_same_bit_for_bit(train, tmp_path):
    path = tmp_path / "same.yaml"
    path.write_text(
        "name: same\nrules:\n  - layers: 0\n    format: none\n  - modules: linear_*\n    format: mxfp8\n"
        "    backward_format: mxfp8_e5m2\n    scale_rule: rceil\n    operands: [x, dy]\n"
    )
    by_file, one = collect(train, tmp_path / "file", "--quant-recipe", path, "--control-iter", 2)
    flags = "--quant-type mxfp8 --quant-backward-type mxfp8_e5m2 --quant-scale-rule rceil --quant-operands x dy "
    flags += "--quant-scope linear --quant-skip-first-layers 1 --control-iter 2"
    by_flags, other = collect(train, tmp_path / "flags", *flags.split())
    assert (one.quant_types, other.quant_types) == (["same"], ["mxfp8"])
    assert by_file.losses == by_flags.losses
    assert len(by_file.losses) == 2
    rows = [{(r.iteration, r.module, r.operation, r.phase, r.tensor_name): r for r in c.records} for c in (one, other)]
    assert rows[0].keys() == rows[1].keys()
    assert {bool(row.formats) for row in rows[0].values()} == {False, True}
    for key, row in rows[0].items():
        assert row.formats == rows[1][key].formats, key
        assert torch.equal(one.load(row), other.load(rows[1][key])), key
    kept = run_info(one, "same")
    assert kept["recipe"] == {"file": str(path), "name": "same", "text": path.read_text()}
    assert kept["modules"] == run_info(other, "mxfp8")["modules"]
    by_name = {name: group["formats"] for group in kept["modules"] for name in group["modules"]}
    assert by_name == {row.module: row.formats or None for row in rows[0].values()}
    assert len(by_name) == LAYERS * len(MODULES) + 1  # and the LM head
    assert json.dumps(kept)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_pattern_of_an_example_is_of_use(path):
    rules = read_recipe(str(path))
    modules = [(f"decoder.layers.{layer}.{name}", layer) for layer in range(4) for name in MODULES]
    modules.append(("output_layer", None))
    hits: list[Hit | None] = [rules.match(name, layer, 4) for name, layer in modules]
    rules.require_layers(4)
    rules.require_matched({hit for hit in hits if hit is not None}, [name for name, _ in modules])


@pytest.mark.matrix
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(train, tmp_path, path):
    run, capture = collect(train, tmp_path, "--quant-recipe", path)
    rules = read_recipe(str(path))
    assert capture.quant_types == [rules.name]
    assert not capture.problems
    assert f"layers of {LAYERS}" in run.output
    for record in capture.records:
        setting = rules.setting(record.module, record.layer_idx, LAYERS)
        quant = setting.attention() if record.layer_type == "attention" else setting.linear()
        assert record.formats == ({} if quant is None else quant.formats())


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    ["--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"],
    ids=["PP 2", "TP 2"],
)
def test_a_pattern_that_only_one_rank_matches_is_of_use_over_all(train, tmp_path, layout):
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: stage2\ndefault: none\nrules:\n  - modules: decoder.layers.1.*.linear_fc1\n    format: mxfp8\n"
        "  - modules: output_layer\n    format: hifp8\n"
    )
    run, capture = collect(train, tmp_path / "c", "--quant-recipe", path, *layout.split(), ranks=2)
    found = {record.module: record.formats["fprop"]["x"] for record in capture.records if record.formats}
    assert found == {"decoder.layers.1.mlp.linear_fc1": "mxfp8", "output_layer": "hifp8"}
    assert run.output.count(f"layers of {LAYERS}") == 1
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text() + "  - modules: linear_fc3\n    format: mxfp8\n")
    with pytest.raises(AssertionError, match=r"wrong.yaml:8: modules 'linear_fc3' matches no module; the model has"):
        train("--quant-recipe", wrong, *layout.split(), ranks=2)


@pytest.mark.matrix
def test_experts_by_their_number(train, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: experts\ndefault: none\nrules:\n  - modules: '*.local_experts.[13].linear_fc1'\n    format: mxfp4\n"
        "  - modules: '*.local_experts.*'\n    format: mxfp8\n"
    )
    experts = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
    run, capture = collect(train, tmp_path / "c", "--quant-recipe", path, *experts.split(), ranks=2)
    found = {r.module.partition(".mlp.")[2]: r.formats["fprop"]["x"] for r in capture.records if r.formats}
    expected = {(n, fc): "mxfp4" if n in (1, 3) and fc == 1 else "mxfp8" for n in range(4) for fc in (1, 2)}
    assert found == {f"experts.local_experts.{n}.linear_fc{fc}": name for (n, fc), name in expected.items()}
    assert "experts.1, 3.linear_fc1" in run.output


@pytest.mark.matrix
def test_the_report_says_what_each_tensor_was_quantised_to(train, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("name: two\ndefault: mxfp4\nrules:\n  - {layers: -1, format: hifp8}\n")
    kept = ("--tensor-filter", "modules=linear_fc1", "--tensor-save-dir", tmp_path / "c", "--save-tensors")
    train("--quant-recipe", path, *kept)
    program = [sys.executable, str(ROOT / "script" / "visualization" / "tensor_visualizer.py"), "--max_workers", "1"]
    subprocess.run([*program, "--tensor_dir", tmp_path / "c", "--output_dir", tmp_path / "out"], check=True)
    text = (tmp_path / "out" / "tensor_stats.txt").read_text()
    assert "-- a mixed run: what the operands were quantised to" in text
    assert "mxfp4 in layer 0: fc1.x, fc1.w, fc1.dy\nhifp8 in layer 1: fc1.x, fc1.w, fc1.dy\n" in text
    assert (tmp_path / "out" / "layer_analysis" / "underflow_two.png").is_file()
    assert "<title>" in (tmp_path / "out" / "report.html").read_text()
