"""A Megatron-LM checkout, underneath our trainer and with its own trainer on top: both are our trainer's run.

Runs where QUANTSCOPE_STOCK_MEGATRON names a checkout of a supported version, whose dataset helpers are compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.quantscope.capture import open_capture
from script.version_matrix import _checkout_version
from tests.end_to_end.conftest import MODEL_FLAGS, ROOT, TIMEOUT_S, VOCABULARY, _losses, pretrain
from tests.end_to_end.test_several_nodes import require_equal, rows

VARIABLE = "QUANTSCOPE_STOCK_MEGATRON"
CHECKOUT = os.environ.get(VARIABLE)
ITERATIONS = 2
CAPTURE = ("--quant-type", "mxfp8", "--save-tensors", "--control-iter", ITERATIONS, "--tensor-save-dir")
# Their trainer divides by it even where nothing is evaluated. Files and no made-up data: theirs has other tokens.
THEIRS = ("--eval-interval", 100, "--split", "80,20,0")
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(CHECKOUT is None, reason=f"{VARIABLE} names no Megatron-LM checkout"),
]


@pytest.fixture
def tokens(tmp_path):
    """The prefix of a data set."""
    prefix = tmp_path / "tokens"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in range(20):
        builder.add_document(torch.arange(100) * (document + 3) % VOCABULARY, [100])
    builder.finalize(f"{prefix}.idx")
    return prefix


def instrumented(*flags, ranks):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    script = [str(ROOT / "script" / "instrument.py"), str(Path(CHECKOUT) / "pretrain_gpt.py")]
    model = [flag for flag in MODEL_FLAGS if flag != "--mock-data"]
    command = [*launcher, *script, *model, *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("ranks", [1, 2])
def test_their_trainer_keeps_what_ours_keeps(tokens, tmp_path, ranks):
    """Bit for bit, since both draw the weights from one seed and read one stream of samples."""
    flags = (*THEIRS, "--data-path", tokens, "--tensor-model-parallel-size", ranks)
    evaluated = ("--eval-interval", 1, "--eval-iters", 1)
    result = instrumented(*flags, *evaluated, *CAPTURE, tmp_path / "theirs", ranks=ranks)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    ours = pretrain(*flags, *CAPTURE, tmp_path / "ours", ranks=ranks, PYTHONPATH=CHECKOUT)
    found, expected = open_capture(tmp_path / "theirs"), open_capture(tmp_path / "ours")
    assert found.problems == []
    require_equal(found, expected)
    losses = [[each.commits["mxfp8"][i]["lm loss"] for i in range(ITERATIONS)] for each in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert float(_losses(result.stdout)[0]) == pytest.approx(float(ours.losses[0]), abs=1e-5)
    assert "training ends after iteration 2" in result.stdout


def test_a_checkout_underneath_trains_on_made_up_data_and_on_files(tokens, tmp_path):
    mock = pretrain("--quant-type", "mxfp8", PYTHONPATH=CHECKOUT)
    files = pretrain("--data-path", tokens, "--split", "100,0,0", *CAPTURE, tmp_path / "kept", PYTHONPATH=CHECKOUT)
    assert len(mock.losses) == 3
    assert len(files.losses) == ITERATIONS
    capture = open_capture(tmp_path / "kept")
    version = _checkout_version(Path(CHECKOUT))
    assert capture.run_info["mxfp8"]["versions"]["megatron-core"].startswith(version)
    assert rows(capture)
