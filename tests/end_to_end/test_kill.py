"""A whole training run, killed at random points: what it had committed is what a run of the same seed keeps."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import xxhash

from megatron.quantscope.capture import CaptureError, open_capture
from tests.end_to_end.conftest import MODEL_FLAGS, ROOT, TIMEOUT_S, pretrain

pytestmark = pytest.mark.slow
KILLS = 10  # of each run of this file
KINDS = [("--tensor-save-format", "pt"), ("--tensor-save-format", "segment"), ("--tensor-save-mode", "both")]
ITERATIONS = 400  # more than a run comes to
REFERENCE_ITERATIONS = 60
LATEST_S = 3.0  # after the first iteration
FLAGS = ("--save-tensors", "--quant-type", "mxfp8", "--collect-micro-batches", "2", "--tensor-filter", "layers=0")
TOLD = ("was not completed", "unfinished", "is broken and left out", "no manifest lists it")
COORDINATES = ("iteration", "micro_batch", "module", "operation", "phase", "tensor_name")


def checksums(capture):
    rows = [record for record in capture.records if record.committed and not record.bare]
    return {tuple(getattr(row, name) for name in COORDINATES): row.checksum for row in rows}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What a run that nobody kills keeps of its first iterations."""
    directory = tmp_path_factory.mktemp("reference")
    limits = ("--train-iters", ITERATIONS, "--control-iter", REFERENCE_ITERATIONS)
    pretrain(*FLAGS, *limits, "--tensor-save-format", "segment", "--tensor-save-dir", directory)
    return checksums(open_capture(directory))


def kill(directory, flags, moment):
    """Start a run, and kill it and all its processes some time after its first iteration."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *MODEL_FLAGS, *FLAGS, *flags]
    command += ["--train-iters", str(ITERATIONS), "--control-iter", "0", "--tensor-save-dir", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said = []
        for line in run.stdout:
            said.append(line)
            if "iteration        1/" in line:
                break
        assert run.poll() is None, "".join(said)[-4000:]
        time.sleep(moment)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", range(KILLS))
def test_what_was_committed_is_there_and_right(tmp_path, expected, number):
    kill(tmp_path, KINDS[number % len(KINDS)], random.Random(number).uniform(0, LATEST_S))
    try:
        capture = open_capture(tmp_path)
    except CaptureError as error:
        pytest.skip(f"killed before anything was on disk: {error}")
    committed = sorted(capture.commits.get("mxfp8", {}))
    assert committed == list(range(len(committed)))
    found = checksums(capture)
    wanted = {row: checksum for row, checksum in expected.items() if row[0] in committed}
    compared = {row: checksum for row, checksum in found.items() if row[0] < REFERENCE_ITERATIONS}
    assert compared == wanted
    for record in capture.records:
        content = capture.load(record).reshape(-1).view(torch.uint8).numpy()
        assert record.checksum in (None, "xxh3_128:" + xxhash.xxh3_128(content).hexdigest())
    assert all(any(words in problem for words in TOLD) for problem in capture.problems), capture.problems
    assert bool(list(tmp_path.rglob(".writing-*"))) == any("unfinished" in problem for problem in capture.problems)
