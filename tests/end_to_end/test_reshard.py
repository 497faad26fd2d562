"""A checkpoint of one layout, loaded in another: training goes on from the same weights and the same optimizer state.

Both layouts train on from the checkpoint, and what they come to is compared, tensor by tensor: with a moment or a count
of steps lost, weights would differ by about the learning rate.
"""

import shutil

import pytest
import torch

from tests.end_to_end.conftest import MODEL_FLAGS
from tests.end_to_end.test_exact_resume import (
    DISTRIBUTED,
    EXPERTS_2,
    INTERLEAVED,
    LATEST,
    PIPELINE_2,
    TENSOR_2,
    latest,
    tensors_of,
)
from tests.end_to_end.versions import state_of_one_layout

MATRIX = pytest.mark.matrix
SAVED, ITERATIONS = 3, 5
FLAGS = ("--save-interval", SAVED, "--train-iters", ITERATIONS)
# Of a tensor's norm: layouts add up in another order, in bf16 of partial sums that are rounded.
TOLERANCE, TOLERANCE_BF16 = 1e-3, 2e-2
ANY = (DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
FOUR_LAYERS = ("--num-layers", 4)
EXPERTS = ("--num-experts", 4, "--moe-router-topk", 2)
BATCH_4 = ("--global-batch-size", 4)
# Name -> ranks and flags of the one layout, those of the other, flags of both
LAYOUTS = {
    "TP 2 to 1": ((2, TENSOR_2), (1, ())),
    "TP 1 to 2": ((1, ()), (2, TENSOR_2)),
    "PP 2 to 1": ((2, PIPELINE_2), (1, ())),
    "PP 1 to 2": ((1, ()), (2, PIPELINE_2)),
    "DP 2 to 1": ((2, ()), (1, ())),
    "DP 1 to 2": ((1, ()), (2, ())),
    "TP 2 to PP 2": ((2, TENSOR_2), (2, PIPELINE_2)),
    "interleaved PP 2 to 1": ((2, (*PIPELINE_2, *INTERLEAVED)), (1, FOUR_LAYERS)),
    "EP 4 to 2": ((4, (*EXPERTS, *BATCH_4, "--expert-model-parallel-size", 4)), (2, (*EXPERTS_2, *BATCH_4))),
}
KINDS = {"plain": (), "distributed": ANY, "plain bf16": ("--bf16",), "distributed bf16": (*ANY, "--bf16")}
# The buckets of the distributed optimizer do not depend on the number of ranks: the data parallel size may change.
BUCKETS = {
    "DP 2 to 1": ((2, (DISTRIBUTED,)), (1, (DISTRIBUTED,))),
    "DP 1 to 2": ((1, (DISTRIBUTED,)), (2, (DISTRIBUTED,))),
}
CASES = [
    pytest.param(one, other, common, id=f"{kind} {name}", marks=MATRIX)
    for kind, common in KINDS.items()
    for name, (one, other) in LAYOUTS.items()
    if "bf16" not in kind or name in ("TP 2 to 1", "PP 1 to 2")
] + [pytest.param(one, other, (), id=f"buckets {name}", marks=MATRIX) for name, (one, other) in BUCKETS.items()]


def train(trainer, layout, *flags):
    ranks, own = layout
    return trainer.run(*MODEL_FLAGS, *FLAGS, *own, *flags, ranks=ranks)


@pytest.mark.usefixtures("reads_checkpoints")
@pytest.mark.parametrize(("one", "other", "common"), CASES)
def test_both_layouts_go_on_alike(trainer, tmp_path, one, other, common):
    here, there = tmp_path / "one", tmp_path / "other"
    train(trainer, one, *common, "--save", here)
    there.mkdir()
    shutil.copytree(here / f"iter_{SAVED:07d}", there / f"iter_{SAVED:07d}")
    (there / LATEST).write_text(str(SAVED))
    output = train(trainer, other, *common, "--load", there, "--save", there)
    assert f"iter_{SAVED:07d}: weights, optimizer and schedules\n" in output, "the random state is of another layout"
    left, right = tensors_of(latest(here)), tensors_of(latest(there))
    compared = [name for name in left.keys() & right.keys() if torch.is_tensor(left[name])]
    if DISTRIBUTED not in (*one[1], *other[1]):
        assert any("exp_avg_sq" in name for name in compared)
    far = {name: distance(left[name], right[name]) for name in compared}
    tolerance = TOLERANCE_BF16 if "--bf16" in common else TOLERANCE
    assert {name: gap for name, gap in far.items() if gap > tolerance} == {}


def distance(one, other):
    """Of two tensors, against the larger one's norm; one that only rounds its value up or down is not far."""
    gap, size = (one.double() - other.double()).norm(), max(one.double().norm(), other.double().norm())
    return float(gap / size) if size else 0.0


REFUSED = {
    "another tensor parallel size": (1, (DISTRIBUTED,), "tensor 2 there and 1 here"),
    "another pipeline parallel size": (
        2,
        (DISTRIBUTED, *PIPELINE_2),
        "tensor 2 there and 1 here, pipeline 1 there and 2",
    ),
    "the plain optimizer": (2, TENSOR_2, "state of the distributed optimizer, which needs --use-distributed-optimizer"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_experts_can_not_be_brought_together_with_the_optimizers_state(trainer, tmp_path, sizes):
    one, other = sizes
    size = "--expert-model-parallel-size"
    trainer.run(*MODEL_FLAGS, *EXPERTS, *ANY, "--train-iters", 1, size, one, "--save", tmp_path, ranks=one)
    goes_on = (*MODEL_FLAGS, *EXPERTS, *ANY, size, other, "--load", tmp_path)
    codes, output = trainer.launch(*goes_on, ranks=other)
    assert codes.count(2) >= 1
    assert f"expert parallel size {one}" in output
    assert "Traceback" not in output
    assert "iter_0000001: weights\n" in trainer.run(*goes_on, "--no-load-optim", ranks=other)


@pytest.fixture(scope="module")
def of_buckets(trainer, tmp_path_factory):
    """A checkpoint with the distributed optimizer's state as its buffers lie, under tensor parallel size 2."""
    directory = tmp_path_factory.mktemp("buckets")
    trainer.run(*MODEL_FLAGS, "--train-iters", 1, *TENSOR_2, DISTRIBUTED, "--save", directory, ranks=2)
    return directory


@pytest.mark.parametrize("name", REFUSED)
@state_of_one_layout
def test_what_can_not_be_brought_into_this_layout_is_refused_in_one_line(trainer, of_buckets, name):
    ranks, flags, complaint = REFUSED[name]
    codes, output = trainer.launch(*MODEL_FLAGS, *flags, "--load", of_buckets, ranks=ranks)
    assert codes.count(2) >= 1
    lines = [line for line in output.splitlines() if "error" in line]
    assert len(lines) == 1
    assert complaint in lines[0]
    assert "--no-load-optim takes weights and progress without it" in lines[0]


def test_and_its_weights_are_taken_without_the_optimizers_state(trainer, of_buckets):
    output = trainer.run(*MODEL_FLAGS, "--load", of_buckets, "--no-load-optim", "--train-iters", 2)
    assert "iter_0000001: weights\n" in output
    assert "iteration        2/" in output
