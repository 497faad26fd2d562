"""Two launchers with one rendezvous, as on two machines: the capture of both is that of one machine with two ranks."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from megatron.quantscope.capture import open_capture
from tests.end_to_end.conftest import MODEL_FLAGS, ROOT, TIMEOUT_S, _losses

NODES = 2
CAPTURE = ("--quant-type", "mxfp8", "--save-tensors", "--control-iter", "2", "--tensor-save-dir")
LAYOUTS = {"tensor parallel": ("--tensor-model-parallel-size", "2"), "data parallel": ()}
pytestmark = pytest.mark.matrix


def on_two_nodes(flags, directories):
    """Train with a launcher a node, each with its own directory; the losses that were printed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = []
    for node, directory in enumerate(directories):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc_per_node", "1"]
        launcher += ["--node_rank", str(node), "--master_addr", "localhost", "--master_port", str(port)]
        command = [*launcher, str(ROOT / "pretrain_gpt.py"), *MODEL_FLAGS, *flags, *CAPTURE, str(directory)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        printed = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    for node, output in zip(nodes, printed, strict=True):
        assert node.returncode == 0, output[-4000:]
    return _losses("".join(printed))


def rows(capture):
    """Everything that says what a row is -> its record."""
    return {
        (each.rank, each.iteration, each.micro_batch, each.module, each.operation, each.phase, each.tensor_name): each
        for each in capture.records
    }


def require_equal(found, expected):
    there, here = rows(expected), rows(found)
    assert there.keys() == here.keys()
    for key, record in there.items():
        assert here[key].parallel == record.parallel
        assert here[key].sample_indices == record.sample_indices
        assert torch.equal(found.load(here[key]), expected.load(record)), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_nodes_are_one_machine_with_two_ranks(train, tmp_path, layout):
    flags = LAYOUTS[layout]
    alone = train(*flags, *CAPTURE, tmp_path / "alone", ranks=NODES)
    expected = open_capture(tmp_path / "alone")

    assert on_two_nodes(flags, [tmp_path / "shared"] * NODES) == alone.losses
    shared = open_capture(tmp_path / "shared")
    assert shared.problems == []
    require_equal(shared, expected)

    own = [tmp_path / "node0", tmp_path / "node1"]
    assert on_two_nodes(flags, own) == alone.losses
    merged = open_capture(own)
    assert merged.problems == []
    assert {record.rank for record in open_capture(own[1]).records} == {1}
    require_equal(merged, expected)
    assert merged.commits.keys() == {"mxfp8"}
    assert merged.commits["mxfp8"].keys() == {0, 1}
