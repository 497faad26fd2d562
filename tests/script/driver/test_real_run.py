"""The scripts with the real trainer: what is planned is what is kept, to the row and to the byte."""

import json
import math
import os
import re
import subprocess

import pytest

from script.driver.environment import ROOT

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def collect(tmp_path, *argv):
    command = [str(ROOT / "run_tensor_collection.sh"), "quick", *argv]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kept(folder):
    """Rows, files and bytes of the tensors in them, from the manifests; every file is checked to be there."""
    rows = [json.loads(line) for path in folder.glob("runs/*/manifest_rank*.jsonl") for line in path.open()]
    tensors = [row for row in rows if row["kind"] == "tensor"]
    files = [row for row in tensors if not row["reference"]]
    assert {row["file"] for row in files} == {path.name for path in folder.glob("*.pt")}
    return len(tensors), len(files), sum(math.prod(row["shape"]) * BYTES[row["dtype"]] for row in files)


def planned(output):
    rows, files, size = re.search(r"(\d+) rows, (\d+) files, (\S+ \S+) into", output).groups()
    return int(rows), int(files), size


def in_words(count):
    return f"{count / 1e6:.3g} MB"


def test_one_process(tmp_path):
    flags = ["mxfp4", "--control-iter", "2", "--collect-micro-batches", "2"]
    rehearsed = collect(tmp_path, *flags, "--", "--tensor-dry-run")
    assert not (tmp_path / "enhanced_tensor_logs").exists()
    output = collect(tmp_path, *flags)
    rows, files, size = kept(tmp_path / "enhanced_tensor_logs" / "mxfp4")
    assert (rows, files) == (2 * 2 * 144, 2 * (128 + 112))
    assert planned(output) == (rows, files, in_words(size))
    assert re.search(rf"^2 iterations, about +{rows} +{files} ", rehearsed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-model-parallel-size", "2"],
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--pipeline-model-parallel-size", "2"],
        [],
    ],
    ids=["tensor", "sequence", "pipeline", "data"],
)
def test_two_processes(tmp_path, flags):
    output = collect(tmp_path, "hifp8", "--nproc", "2", "--dtype", "fp32", "--collect-micro-batches", "2", "--", *flags)
    rows, files, size = kept(tmp_path / "enhanced_tensor_logs" / "hifp8")
    assert planned(output) == (rows, files, in_words(size))
