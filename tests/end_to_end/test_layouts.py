"""However a model is spread over ranks, what is kept of it is the same: put together, it is one rank's capture.

One rank trains, saves after the first iteration and goes on; every other layout loads that checkpoint, so it begins in
the middle of the stream of samples, and keeps the second iteration, as the one rank does. fp32, nothing quantised.
"""

import pytest
import torch

from megatron.quantscope.analysis.comparison import ComparisonLog, compare, runs_of
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.full_tensor import logical_key
from megatron.quantscope.flags.capture import POINTS
from tests.end_to_end.conftest import SEQUENCE

SAVED, BATCH = 1, 2  # iterations before the one that is compared; samples in each
FLAGS = ["--use-cpu-initialization", "--quant-type", "none"]
TENSOR, PIPELINE, CONTEXT = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
LAYOUTS = {
    "TP 2": (2, [TENSOR, 2]),
    "TP 2 with sequence parallelism": (2, [TENSOR, 2, "--sequence-parallel"]),
    "PP 2": (2, [PIPELINE, 2]),
    "DP 2": (2, []),
    "CP 2": (2, [CONTEXT, 2]),
    "TP 2 x CP 2": (4, [TENSOR, 2, "--sequence-parallel", CONTEXT, 2]),
}
# Stages and data parallel ranks run the GEMMs of one rank. Others cut a GEMM's sums or share its rows out, so terms are
# added in another order, here and in all that came before. A sum's terms may cancel, so errors are measured against the
# tensor's largest element; the worst that was seen is 11 roundings of it.
THE_VERY_SAME = ("PP 2", "DP 2")
ROUNDING, ROUNDINGS = 2.0**-24, 24
LOSS_TOLERANCE = 1e-6  # of 5.5, in float32
QUANTISED = {
    # Blocks of 32 are cut alike where a context parallel rank's chunks, quarters of the sequence, are whole blocks.
    "blocks": ("--quant-type", "mxfp8", "--seq-length", 128, "--max-position-embeddings", 128),
    # A tensor's scale is that of all ranks' parts of it.
    "scales of whole tensors": ("--quant-type", "fp8_e4m3", "--quant-scope", "linear"),
}
SMALLEST_SQNR_DB_OF_FP32 = 100.0  # a rounding is 150 dB; sums in another order, through the layers and back
SMALLEST_SQNR_DB = 50.0  # a rounding on the other side of a boundary now and then; the formats' error lies at 30 dB


@pytest.fixture(scope="module")
def one_rank(train, tmp_path_factory):
    """(capture, directory of the checkpoint after the first iteration)"""
    checkpoints, directory = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("one_rank")
    save = ["--save", checkpoints, "--save-interval", SAVED]
    train(*FLAGS, *save, *keep(directory), "--tensor-schedule", f"{SAVED}:1:")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return open_capture(directory), checkpoints


@pytest.fixture(scope="module")
def spread(train, one_rank, tmp_path_factory):
    """`spread(layout, *flags)` -> capture of the same iteration in another layout."""
    captures = {}

    def run(layout, *flags):
        if (layout, flags) not in captures:
            ranks, how = LAYOUTS[layout]
            directory = tmp_path_factory.mktemp("spread")
            train(*FLAGS, "--load", one_rank[1], *keep(directory), *how, *flags, ranks=ranks)
            captures[layout, flags] = open_capture(directory)
        return captures[layout, flags]

    return run


def keep(directory):
    amount = ["--control-iter", 1, "--collect-micro-batches", BATCH, "--tensor-points", *POINTS]
    return ["--save-tensors", "--tensor-save-dir", directory, *amount]


def assert_close(found, expected, key):
    """They differ by no more than some roundings of the largest element."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), key
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= ROUNDINGS * ROUNDING * expected.abs().max().item(), key


def by_key(capture):
    return {logical_key(record): record for record in capture.records}


def test_one_rank_keeps_the_second_iteration(one_rank):
    capture, _ = one_rank
    assert not capture.problems
    assert {(record.iteration, record.micro_batch, record.sample_indices) for record in capture.records} == {
        (SAVED, micro_batch, (SAVED * BATCH + micro_batch,)) for micro_batch in range(BATCH)
    }
    assert {record.grad_scale for record in capture.records} == {1.0}
    assert all(record.shard == () for record in capture.records)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_what_one_rank_keeps(spread, one_rank, layout):
    capture, expected = spread(layout), by_key(one_rank[0])
    assert not capture.problems
    assert by_key(capture).keys() == expected.keys()
    for record in capture.records:
        key = logical_key(record)
        whole, one = capture.full_tensor(record), one_rank[0].load(expected[key])
        if layout in THE_VERY_SAME or record.tensor_name == "weight":
            assert torch.equal(whole, one), key
        else:
            assert_close(whole, one, key)


@pytest.mark.parametrize("layout", ["TP 2 with sequence parallelism", "DP 2"])
def test_a_layout_is_compared_with_one_rank(spread, one_rank, layout):
    """Every tensor finds its partner, put together from its parts, and gradients without what they were scaled by."""
    runs, log = runs_of([one_rank[0], spread(layout)]), ComparisonLog()
    with worker_pool(1) as workers:
        table = compare(runs, workers, log=log)
    assert log.problems == log.notes == []
    assert table["rank"].isna().all()
    weights = table["family"] == "weight"
    assert weights.any()
    assert table[weights]["equal"].all()
    if layout in THE_VERY_SAME:
        assert (table["sqnr_db"] == float("inf")).all()
    else:
        assert not table["equal"].all()
        assert (table["sqnr_db"] > SMALLEST_SQNR_DB_OF_FP32).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_and_documents_do_not_depend_on_the_layout(spread, one_rank, layout):
    def origins(capture):
        return {(record.iteration, record.sample_indices, record.document_ids) for record in capture.records}

    assert origins(spread(layout)) == origins(one_rank[0])
    assert all(len(documents) == 1 and documents[0] for _, _, documents in origins(one_rank[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_agree(spread, one_rank, layout):
    (found,), (expected,) = (capture.commits["fp32"].values() for capture in (spread(layout), one_rank[0]))
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert {"lm loss", "grad norm"} <= found.keys()


@pytest.mark.parametrize(("layout", "scale"), [("TP 2", 1), ("PP 2", 1), ("DP 2", 2), ("CP 2", 2), ("TP 2 x CP 2", 2)])
def test_gradients_say_what_the_layout_multiplied_them_by(spread, layout, scale):
    assert {record.grad_scale for record in spread(layout).records} == {scale}


def test_with_the_loss_per_token_gradients_are_of_the_sum(spread, one_rank):
    """No rank divides by its tokens, and none takes a mean: every gradient is that of one rank times all tokens."""
    flags = ("--calculate-per-token-loss", "--tensor-filter", "modules=*.layers.*", "tensors=grad_*")
    capture, expected = spread("DP 2", *flags), by_key(one_rank[0])
    assert {record.grad_scale for record in capture.records} == {1.0}
    for record in capture.records:
        key = logical_key(record)
        assert_close(capture.full_tensor(record), BATCH * SEQUENCE * one_rank[0].load(expected[key]), key)


def test_context_parallel_ranks_keep_their_share(spread):
    """Queries, keys and values before keys and values are gathered, and their gradients after they are summed."""
    lengths = {}
    for record in spread("CP 2").records:
        if record.layer_type == "attention":
            (split,) = record.shard
            assert (split["over"], split["order"]) == ("cp", "zigzag")
            lengths[record.tensor_name] = (split["dim"], record.shape[split["dim"]])
    names = ["query", "key", "value", "output"]
    along_rows = dict.fromkeys([*names, *(f"grad_{name}" for name in names)], (0, SEQUENCE // 2))
    assert lengths == along_rows | {"attention_probs": (2, SEQUENCE // 2)}


@pytest.mark.parametrize("flags", QUANTISED.values(), ids=QUANTISED)
def test_context_parallel_ranks_quantise_as_one_rank(spread, train, one_rank, tmp_path, flags):
    """Blocks along keys are cut after gathering, in the order of the sequence; those along queries and tokens fit."""
    capture = spread("CP 2", *flags)
    train(*FLAGS, "--load", one_rank[1], *keep(tmp_path), *flags)
    one = open_capture(tmp_path)
    expected = by_key(one)
    assert not capture.problems
    assert by_key(capture).keys() == expected.keys()
    for record in capture.records:
        whole, reference = capture.full_tensor(record).double(), one.load(expected[logical_key(record)]).double()
        noise = (whole - reference).square().sum()
        assert reference.square().sum() > noise * 10 ** (SMALLEST_SQNR_DB / 10), logical_key(record)
