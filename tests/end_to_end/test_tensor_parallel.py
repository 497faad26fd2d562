"""Two ranks of tensor parallelism: the loss of one rank, and shards that put together are its tensors."""

import pytest
import torch

from megatron.quantscope.capture import open_capture
from tests.end_to_end.conftest import LAYERS, pretrain

TOLERANCE = 1e-4
ROWS_A_LAYER = 36


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(losses, capture) of the same training by 1 and by 2 ranks, unquantised, fp32."""
    found = {}
    for ranks in (1, 2):
        directory = tmp_path_factory.mktemp(f"tp{ranks}")
        flags = ["--tensor-model-parallel-size", ranks, "--use-cpu-initialization", "--quant-type", "none"]
        keep = ["--save-tensors", "--tensor-save-dir", directory, "--control-iter", 2]
        run = pretrain(*flags, *keep, ranks=ranks)
        found[ranks] = [float(loss) for loss in run.losses], open_capture(directory)
    return found


def test_losses_agree(runs):
    (one, _), (two, _) = runs[1], runs[2]
    assert len(one) == 2
    assert two == pytest.approx(one, abs=TOLERANCE)


def test_every_rank_keeps_every_row(runs):
    _, capture = runs[2]
    for rank in (0, 1):
        assert sum(record.rank == rank for record in capture.records) == 2 * ROWS_A_LAYER * LAYERS
    assert {record.quant_type for record in capture.records} == {"fp32"}


def test_shards_put_together_are_the_tensors_of_one_rank(runs):
    """A split tensor is concatenated, a partial one summed, a whole one is the same on both ranks."""
    whole = {key_of(record): runs[1][1].load(record) for record in runs[1][1].records}
    shards = {}
    for record in runs[2][1].records:
        shards.setdefault(key_of(record), {})[record.rank] = (record, runs[2][1].load(record))
    assert shards.keys() == whole.keys()
    for key, parts in shards.items():
        (record, first), (_, second) = parts[0], parts[1]
        torch.testing.assert_close(
            together(record, first, second), rearranged(record, whole[key]), rtol=2e-3, atol=2e-6, msg=str(key)
        )


def key_of(record):
    return record.iteration, record.micro_batch, record.module, record.operation, record.tensor_name


def together(record, first, second):
    if record.stage == "partial":
        return first + second
    if record.shard is not None:
        return torch.cat([first, second], dim=record.shard["dim"])
    torch.testing.assert_close(first, second)
    return first


def rearranged(record, tensor):
    """A gated linear_fc1 keeps [gate, up] on every rank: the whole in the order that the concatenated shards have."""
    if not record.module.endswith("linear_fc1") or record.shard is None:
        return tensor
    dim = record.shard["dim"]
    gate_and_up = [tensor_half.chunk(2, dim) for tensor_half in tensor.chunk(2, dim)]
    return torch.cat([piece for rank in zip(*gate_and_up, strict=True) for piece in rank], dim)


def test_quantised_capture_over_two_ranks(tmp_path):
    """The line of the README: TP 2, MXFP4, one iteration."""
    flags = ["--tensor-model-parallel-size", 2, "--save-tensors", "--tensor-save-dir", tmp_path, "--control-iter", 1]
    run = pretrain(*flags, "--quant-type", "mxfp4", ranks=2)
    capture = open_capture(tmp_path)
    assert len(run.losses) == 1
    assert len(capture.records) == 2 * ROWS_A_LAYER * LAYERS
    assert {record.parallel["tp_rank"] for record in capture.records} == {0, 1}
    assert not capture.problems
