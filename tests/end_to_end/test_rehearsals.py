"""Dry run and interference check of a tensor-parallel run: ranks count together, and judge together."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import MODEL_FLAGS, ROOT, TIMEOUT_S

TENSOR_PARALLEL = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--quant-type", "mxfp8"]
COUNTS = ("rows", "files", "bytes")


def written(directory):
    """What each rank's commit record says, and what lies on the disk."""
    manifests = sorted(directory.glob("*/runs/*/manifest_*.jsonl"))
    commits = [json.loads(line) for path in manifests for line in path.open() if '"commit"' in line]
    files = [*directory.glob("*/*.pt"), *directory.glob("*/runs/*/*.safetensors")]
    return [[commit[name] for name in COUNTS] for commit in commits], sum(path.stat().st_size for path in files)


def numbers(line):
    return [int(number.replace(",", "")) for number in re.findall(r" (\d[\d,]*)(?= )", line)]


@pytest.mark.parametrize(
    "flags",
    [["--collect-micro-batches", 2], ["--tensor-save-format", "segment", "--tensor-save-mode", "both", "--bf16"]],
    ids=["pt", "segment"],
)
def test_a_dry_run_adds_up_the_ranks(train, tmp_path, flags):
    flags = [*TENSOR_PARALLEL, *flags, "--tensor-save-dir", tmp_path / "capture"]
    output = train("--tensor-dry-run", *flags, ranks=2).output
    assert not (tmp_path / "capture").exists()
    assert "lm loss" not in output
    train("--save-tensors", *flags, ranks=2)
    ranks, on_disk = written(tmp_path / "capture")
    added = [sum(column) for column in zip(*ranks, strict=True)]
    assert len(ranks) == 2
    assert numbers(re.search(r"^an iteration .*$", output, re.MULTILINE).group(0))[:3] == added
    assert sum(size for _, _, size in ranks) == on_disk
    rank, *largest = numbers(re.search(r"^rank \d has most.*$", output, re.MULTILINE).group(0))[:4]
    assert largest == ranks[rank]
    assert largest[-1] == max(size for _, _, size in ranks)


def test_an_interference_check_needs_no_difference_on_any_rank(train, tmp_path):
    flags = [*TENSOR_PARALLEL, "--bf16", "--tensor-save-dir", tmp_path / "capture"]
    output = train("--tensor-check-interference", *flags, ranks=2).output
    assert re.search(r"capture changed nothing: 2 steps, \d\d gradient buffers bit for bit", output)
    assert [rows for rows, _, _ in written(tmp_path / "capture")[0]] == [72, 64]  # the second leaves out what is whole


INTERFERING = """
import os, sys
from megatron.quantscope.capture import CaptureSession
from megatron.training.main import _import_core, main

def end_and_change(self, scalars, end=CaptureSession.end_iteration):
    if os.environ["RANK"] == "1":
        WEIGHTS[0].data[0] += 1.0
    end(self, scalars)

def connect(args, model, optimizer):
    WEIGHTS.append(model[0].module.decoder.layers[1].mlp.linear_fc1.weight)
    known(args, model, optimizer)

WEIGHTS = []
CaptureSession.end_iteration = end_and_change
_import_core()
from megatron.training import training
known, training.connect = training.connect, connect
sys.exit(main())
"""


def test_a_difference_on_one_rank_is_everyones(tmp_path):
    """The second rank's capture alone changes a weight: rank 0 says so, once, and the job fails."""
    script = tmp_path / "interfering.py"
    script.write_text(INTERFERING)
    flags = [*MODEL_FLAGS, *TENSOR_PARALLEL, "--tensor-check-interference", "--tensor-save-dir", tmp_path / "capture"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*launcher, *map(str, flags)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.returncode == 1
    complaints = re.findall(r"^pretrain_gpt.py: error.*$", result.stderr, re.MULTILINE)
    assert complaints == [
        "pretrain_gpt.py: error: capture changed the training, first in step 1, parameter of "
        "decoder.layers.1.mlp.linear_fc1.weight on rank 1"
    ]
