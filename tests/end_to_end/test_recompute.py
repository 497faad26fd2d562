"""Two pipeline stages that recompute everything: what is kept is what a run without recomputation keeps.

Under the 1F1B schedule the first stage runs the forward of the second micro-batch before the backward of the first, and
the forward of the first again within that backward: coordinates must come from the first pass, and no row come twice.
"""

from collections import Counter

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.flags.capture import POINTS
from tests.end_to_end.conftest import LAYERS, pretrain

STAGES, MICRO_BATCHES, KEPT_MICRO_BATCHES, ITERATIONS = 2, 4, 2, 2
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
SCHEDULE = [
    *("--pipeline-model-parallel-size", STAGES, "--global-batch-size", MICRO_BATCHES),
    *("--collect-micro-batches", KEPT_MICRO_BATCHES, "--control-iter", ITERATIONS, "--tensor-points", *POINTS),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{recomputed: (losses, capture)} of the same training."""
    found = {}
    for recomputed in (False, True):
        directory = tmp_path_factory.mktemp("capture")
        flags = ["--quant-type", "mxfp8", "--save-tensors", "--tensor-save-dir", directory, *SCHEDULE]
        run = pretrain(*flags, *(FULL if recomputed else []), ranks=STAGES)
        found[recomputed] = run.losses, open_capture(directory)
    return found


def key_of(record):
    when = record.rank, record.iteration, record.micro_batch, tuple(record.sample_indices)
    return *when, record.layer_type, record.module, record.operation, record.phase, record.tensor_name


def test_losses_are_those_without_recomputation(runs):
    assert len(runs[True][0]) == ITERATIONS
    assert runs[True][0] == runs[False][0]


def test_every_row_is_there_once_with_the_coordinates_of_its_first_pass(runs):
    plain, recomputed = (Counter(map(key_of, runs[which][1].records)) for which in (False, True))
    assert recomputed == plain
    assert set(recomputed.values()) == {1}
    samples = {(r.iteration, r.micro_batch): tuple(r.sample_indices) for r in runs[True][1].records}
    assert samples == {(0, 0): (0,), (0, 1): (1,), (1, 0): (4,), (1, 1): (5,)}
    assert {(r.rank, r.layer_idx) for r in runs[True][1].records} == {(0, 0), (1, LAYERS - 1), (1, None)}
    assert not runs[True][1].problems


def test_tensors_are_bitwise_equal(runs):
    _, capture = runs[False]
    expected = {key_of(record): capture.load(record) for record in capture.records}
    for record in runs[True][1].records:
        assert torch.equal(runs[True][1].load(record), expected[key_of(record)]), key_of(record)


def test_rows_of_the_layers_say_that_they_were_recomputed(runs):
    assert not any(record.recomputed for record in runs[False][1].records)
    for record in runs[True][1].records:
        assert record.recomputed == (record.layer_idx is not None)
