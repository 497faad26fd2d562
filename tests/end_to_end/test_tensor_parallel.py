"""Two ranks of tensor parallelism: the loss of one rank, and shards that put together are its tensors."""

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.flags.capture import POINTS
from tests.end_to_end.conftest import LAYERS, pretrain
from tests.end_to_end.versions import same_weights

TOLERANCE = 1e-4
ROWS_A_LAYER = 36
POINT_ROWS_A_LAYER = {"residual": 2, "norm": 6, "activation": 1, "attention": 1}
POINT_ROWS_OUTSIDE = {"residual": 1, "norm": 3, "logits": 2}
LAYOUTS = {1: [], 2: ["--tensor-model-parallel-size", 2]}
LAYOUTS["sequence parallel"] = [*LAYOUTS[2], "--sequence-parallel"]
TWO_RANKS = [layout for layout in LAYOUTS if layout != 1]
GATHERED = 2 * LAYERS + 2 * LAYERS  # inputs of column-parallel and grad_outputs of row-parallel linears: kept by rank 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(losses, capture) of the same training by each layout, unquantised, fp32, with all points."""
    found = {}
    for layout, flags in LAYOUTS.items():
        directory = tmp_path_factory.mktemp("capture")
        settings = ["--use-cpu-initialization", "--quant-type", "none", "--tensor-points", *POINTS]
        keep = ["--save-tensors", "--tensor-save-dir", directory, "--control-iter", 2]
        run = pretrain(*flags, *settings, *keep, ranks=2 if flags else 1)
        found[layout] = [float(loss) for loss in run.losses], open_capture(directory)
    return found


@same_weights
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_losses_agree(runs, layout):
    (one, _), (two, _) = runs[1], runs[layout]
    assert len(one) == 2
    assert two == pytest.approx(one, abs=TOLERANCE)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_every_rank_keeps_every_row(runs, layout):
    """Bar what sequence parallelism gathers: it is the same everywhere, and the first rank keeps it."""
    _, capture = runs[layout]
    points = sum(POINT_ROWS_A_LAYER.values()) * LAYERS + sum(POINT_ROWS_OUTSIDE.values())
    rows = 2 * (ROWS_A_LAYER * LAYERS + points)
    left_out = 2 * GATHERED if layout == "sequence parallel" else 0
    assert [sum(record.rank == rank for record in capture.records) for rank in (0, 1)] == [rows, rows - left_out]
    assert {record.quant_type for record in capture.records} == {"fp32"}


@same_weights
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_shards_put_together_are_the_tensors_of_one_rank(runs, layout):
    """A split tensor is concatenated, a partial one summed, a whole one is the same on both ranks."""
    whole = {key_of(record): runs[1][1].load(record) for record in runs[1][1].records}
    shards = {}
    for record in runs[layout][1].records:
        shards.setdefault(key_of(record), {})[record.rank] = (record, runs[layout][1].load(record))
    assert shards.keys() == whole.keys()
    for key, parts in shards.items():
        tensors = [tensor for _, (_, tensor) in sorted(parts.items())]
        together = put_together(parts[0][0], tensors)
        torch.testing.assert_close(together, whole[key], rtol=2e-3, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


def key_of(record):
    where = record.iteration, record.micro_batch, record.layer_type, record.module
    return *where, record.operation, record.phase, record.tensor_name


def put_together(record, tensors):
    """The whole tensor from both ranks' parts, by what the record says of its shards."""
    if not record.shard:
        for tensor in tensors[1:]:
            torch.testing.assert_close(tensor, tensors[0])
        return tensors[0]
    (split,) = record.shard
    assert split["over"] == "tp"
    assert (record.stage == "partial") == ("reduce" in split)
    if record.stage == "partial":
        return sum(tensors)
    pieces = [tensor.chunk(split.get("pieces", 1), split["dim"]) for tensor in tensors]
    return torch.cat([part for piece in zip(*pieces, strict=True) for part in piece], split["dim"])


def test_quantised_capture_over_two_ranks(tmp_path):
    """The line of the README: TP 2, MXFP4, one iteration."""
    flags = ["--tensor-model-parallel-size", 2, "--save-tensors", "--tensor-save-dir", tmp_path, "--control-iter", 1]
    run = pretrain(*flags, "--quant-type", "mxfp4", ranks=2)
    capture = open_capture(tmp_path)
    assert len(run.losses) == 1
    assert len(capture.records) == 2 * ROWS_A_LAYER * LAYERS
    assert {record.parallel["tp_rank"] for record in capture.records} == {0, 1}
    assert not capture.problems
