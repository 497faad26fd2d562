"""Every row of the table of DESIGN 4 is there, as often as docs/capture.md says, and training stops by itself."""

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.end_to_end.conftest import LAYERS, launch, pretrain

LINEAR_ROWS = {
    ("forward", "pre", "input"),
    ("forward", "pre", "weight"),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
    ("backward", "pre", "weight"),
    ("backward", "post", "grad_input"),
    ("backward", "post", "grad_weight"),
}
ATTENTION_ROWS = {
    ("forward", "pre", "query"),
    ("forward", "pre", "key"),
    ("forward", "pre", "value"),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
    ("backward", "post", "grad_query"),
    ("backward", "post", "grad_key"),
    ("backward", "post", "grad_value"),
}
MODULES = {
    "self_attention.linear_qkv": LINEAR_ROWS,
    "self_attention.core_attention": ATTENTION_ROWS,
    "self_attention.linear_proj": LINEAR_ROWS,
    "mlp.linear_fc1": LINEAR_ROWS,
    "mlp.linear_fc2": LINEAR_ROWS,
}
ITERATIONS, MICRO_BATCHES = 2, 2


@pytest.fixture(scope="module")
def capture(captured):
    return captured("mxfp8", "--control-iter", ITERATIONS, "--collect-micro-batches", MICRO_BATCHES)


def test_every_row_of_every_module_is_there_once(capture):
    found = Counter(
        (r.iteration, r.micro_batch, r.module, r.operation, r.phase, r.tensor_name) for r in capture.records
    )
    expected = {
        (iteration, micro_batch, f"decoder.layers.{layer}.{module}", *row)
        for iteration in range(ITERATIONS)
        for micro_batch in range(MICRO_BATCHES)
        for layer in range(LAYERS)
        for module, rows in MODULES.items()
        for row in rows
    }
    assert set(found) == expected
    assert set(found.values()) == {1}


def test_counts_are_those_of_the_formula(capture):
    files = [record for record in capture.records if not record.reference]
    assert len(capture.records) == ITERATIONS * MICRO_BATCHES * 36 * LAYERS
    assert len(files) == ITERATIONS * (32 * LAYERS + (MICRO_BATCHES - 1) * 28 * LAYERS)
    assert len({record.path for record in capture.records}) == len(files)
    assert all(record.tensor_name == "weight" for record in capture.records if record.reference)
    assert not capture.problems


def test_samples_are_numbered_as_the_sampler_counts(capture):
    seen = {(r.iteration, r.micro_batch): tuple(r.sample_indices) for r in capture.records}
    assert seen == {(0, 0): (0,), (0, 1): (1,), (1, 0): (2,), (1, 1): (3,)}
    assert all(record.sample_idx == record.sample_indices[0] for record in capture.records)


def test_the_loss_of_every_collected_iteration_is_kept(capture):
    (commits,) = capture.commits.values()
    assert sorted(commits) == [0, 1]
    assert all(scalars["lm loss"] > 0 for scalars in commits.values())


def test_training_stops_by_itself(tmp_path):
    run = pretrain("--save-tensors", "--tensor-save-dir", tmp_path, "--quant-type", "bf16", "--control-iter", 1)
    assert len(run.losses) == 1


def test_the_environment_switches_capture_on_and_the_flag_wins(tmp_path):
    by_environment, by_flag = tmp_path / "environment", tmp_path / "flag"
    environment = {"TENSOR_SAVE_ENABLED": "Yes", "TENSOR_SAVE_DIR": str(by_environment), "CUSTOM_QUANT_TYPE": "mxfp4"}
    pretrain("--tensor-filter", "layers=0", "tensors=output", "--tensor-save-dir", by_flag, **environment)
    assert not by_environment.exists()
    names = [path.name for path in (by_flag / "mxfp4").glob("*.pt")]
    assert len(names) == len(MODULES)
    assert all("_L0_forward_post_" in name and name.endswith("_rank0_sample0_output.pt") for name in names)


def test_a_file_opens_with_torch_alone(capture):
    """Our code is not on the path of that Python, and nothing but weights is allowed."""
    path = next(record.path for record in capture.records if record.tensor_name == "grad_output")
    code = (
        "import json, sys, torch\n"
        "content = torch.load(sys.argv[1], weights_only=True)\n"
        "assert not any(name.startswith('megatron') for name in sys.modules)\n"
        "print(json.dumps([sorted(content), list(content['tensor'].shape), content['metadata']]))"
    )
    result = subprocess.run([sys.executable, "-I", "-c", code, path], capture_output=True, text=True, cwd="/")
    keys, shape, metadata = json.loads(result.stdout)
    assert keys == ["metadata", "tensor"]
    assert metadata["shape"] == shape
    assert metadata["quant_type"] == "mxfp8"
    assert metadata["parallel"]["tp_size"] == 1


def test_the_head_is_kept_only_when_it_is_named(tmp_path, capture):
    assert not any("output_layer" in record.module for record in capture.records)
    flags = ["--tensor-filter", "modules=output_layer", "--quant-type", "mxfp8"]
    pretrain("--save-tensors", "--tensor-save-dir", tmp_path, "--control-iter", 1, *flags)
    names = sorted(path.name for path in (tmp_path / "mxfp8").glob("*.pt"))
    assert len(names) == len(LINEAR_ROWS) - 1
    assert all("_linear_forward_" in name or "_linear_backward_" in name for name in names)
    content = torch.load(tmp_path / "mxfp8" / names[0], weights_only=True)
    assert content["metadata"]["layer_idx"] is None
    assert content["metadata"]["formats"] == {}


def test_a_filter_that_keeps_nothing_ends_the_run_in_one_line(tmp_path):
    flags = ("--save-tensors", "--tensor-save-dir", tmp_path, "--quant-type", "mxfp8", "--tensor-filter", "layers=9")
    result = launch(*flags)
    assert result.returncode == 2
    (line,) = (line for line in result.stderr.splitlines() if "error:" in line)
    assert line.endswith("error: --tensor-filter matches no module of the model: no tensor would be kept")
    assert not list(tmp_path.rglob("*.json*"))
