from argparse import Namespace
from itertools import product

import pytest

from script.driver.plan import Total, plan

SMOLLM2 = {
    "num_layers": 30,
    "hidden_size": 576,
    "ffn_hidden_size": 1536,
    "num_attention_heads": 9,
    "num_query_groups": 3,
    "kv_channels": 64,
    "swiglu": True,
    "bf16": True,
    "fp16": False,
    "seq_length": 256,
    "micro_batch_size": 1,
    "data_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
}
TINY = SMOLLM2 | {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8}
TINY |= {"num_query_groups": 4, "kv_channels": 32}


def planned(shape, iterations=1, micro_batches=1, **changes):
    return plan(Namespace(**(shape | changes)), iterations=iterations, micro_batches=micro_batches)


def test_the_default_model_is_what_was_measured():
    """shared/facts/smollm2.md section 3: 960 files; 424.7 MB of weights and 1.198 MB a token."""
    first = planned(SMOLLM2).first
    assert (first.rows, first.files) == (1080, 960)
    assert first.payload == pytest.approx(731e6, rel=1e-3)
    assert planned(SMOLLM2, seq_length=1024).first.payload == pytest.approx(1652e6, rel=1e-3)


def test_weights_are_written_once_in_an_iteration():
    plans = planned(SMOLLM2, iterations=3, micro_batches=2)
    assert plans.total.rows == 6 * 1080
    assert plans.total.files == 3 * (960 + 960 - 4 * 30)
    assert plans.first.payload - plans.further.payload == 212_336_640  # the bytes of all four weights of 30 layers


def test_data_parallel_ranks_keep_their_own():
    assert planned(SMOLLM2, data_parallel_size=2).first == planned(SMOLLM2).first * 2


def test_context_parallel_ranks_share_the_tokens_and_repeat_the_weights():
    one, two = planned(SMOLLM2).first, planned(SMOLLM2, context_parallel_size=2).first
    assert (two.rows, two.files) == (2 * one.rows, 2 * one.files)
    weights = 2 * 212_336_640  # of all four linears, and their gradients
    assert two.payload == one.payload + weights


def test_bytes_follow_the_dtype():
    assert planned(SMOLLM2, bf16=False).first.payload == 2 * planned(SMOLLM2).first.payload


def rank_tensors(shape, ranks, rank, sequence_parallel):
    """Written out rank by rank, from the text of docs/capture.md: (elements, is a file) of every row of a layer."""
    tokens, hidden, ffn = shape["seq_length"], shape["hidden_size"], shape["ffn_hidden_size"]
    query, key = (shape[name] * shape["kv_channels"] for name in ("num_attention_heads", "num_query_groups"))
    skip_gathered = sequence_parallel and rank > 0
    for inputs, outputs in ((hidden, query + 2 * key), (hidden, 2 * ffn)):  # column-parallel
        share = outputs // ranks
        yield from [(tokens * inputs, True)] * (not skip_gathered)  # input
        yield from [(share * inputs, True), (tokens * share, True)]  # weight, output
        yield from [(tokens * share, True), (share * inputs, False)]  # grad_output, weight again
        yield from [(tokens * inputs, True), (share * inputs, True)]  # grad_input, grad_weight
    for inputs, outputs in ((query, hidden), (ffn, hidden)):  # row-parallel
        share = inputs // ranks
        yield from [(tokens * share, True), (share * outputs, True), (tokens * outputs, True)]
        yield from [(tokens * outputs, True)] * (not skip_gathered)  # grad_output
        yield from [(share * outputs, False), (tokens * share, True), (share * outputs, True)]
    yield from [(tokens * query // ranks, True)] * 4 + [(tokens * key // ranks, True)] * 4


@pytest.mark.parametrize(("ranks", "sequence_parallel"), product([1, 2, 4], [False, True]))
def test_tensor_parallel_ranks_add_up(ranks, sequence_parallel):
    sequence_parallel = sequence_parallel and ranks > 1  # as the trainer sets it
    rows = [row for rank in range(ranks) for row in rank_tensors(TINY, ranks, rank, sequence_parallel)]
    files = [elements for elements, is_file in rows if is_file]
    got = planned(TINY, tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel).first
    assert got == Total(len(rows), len(files), 2 * sum(files)) * TINY["num_layers"]
