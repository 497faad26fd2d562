"""However a model is spread over ranks, it trains alike; and the two half precisions train at all.

One rank trains and saves; the others start from its weights or go on from its checkpoint, so a layout that reads,
splits, sums or restores something wrongly gives another loss or another gradient norm.
"""

import shutil

import pytest

from megatron.quantscope.capture import open_capture
from megatron.training.failure import UsageError
from megatron.training.initialize import initialize
from tests.end_to_end.conftest import LAYERS, launch, pretrain
from tests.training.log_lines import iterations, values

ITERATIONS, SAVED = 3, 1
GLOBAL_BATCH, MICRO_BATCHES = 4, 2  # micro-batches of a rank of two, one sample each
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 2e-3  # norms are printed with three decimals
# Steps large enough that a gradient which is wrong in one norm moves the next loss by more than the tolerance.
FLAGS = ["--global-batch-size", GLOBAL_BATCH, "--use-cpu-initialization", "--quant-type", "none", "--lr", 1e-2]
FIRST_SCALE = 2.0**24  # too large for float16, not by far


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """(run, directory): a single rank's training, and its checkpoint after the first iteration as the latest."""
    directory = tmp_path_factory.mktemp("one_rank")
    run = pretrain(*FLAGS, "--save", directory, "--save-interval", SAVED)
    for path in directory.glob("iter_*"):
        if path.name != f"iter_{SAVED:07d}":
            shutil.rmtree(path)
    (directory / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return run, directory


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """`kept(*flags)` -> (run of two ranks, capture of its first two micro-batches of every iteration)."""

    def run(*flags):
        directory = tmp_path_factory.mktemp("kept")
        keep = ["--save-tensors", "--tensor-save-dir", directory, "--control-iter", 0]
        keep += ["--collect-micro-batches", MICRO_BATCHES, "--tensor-filter", "tensors=input,query"]
        return pretrain(*FLAGS, *keep, *flags, ranks=2), open_capture(directory)

    return run


@pytest.fixture(scope="module")
def data_parallel(kept):
    return kept()


@pytest.fixture(scope="module")
def pipeline_parallel(kept, one_rank):
    return kept("--pipeline-model-parallel-size", 2, "--load", one_rank[1])


def assert_same_training(run, reference, *, after=0):
    """`run` has the losses and gradient norms that `reference` had after that many iterations."""
    assert iterations(run) == list(range(after + 1, ITERATIONS + 1))
    for name, tolerance in (("lm loss", LOSS_TOLERANCE), ("grad norm", NORM_TOLERANCE), ("learning rate", 0)):
        ours, theirs = ([float(value) for value in values(each, name)] for each in (run, reference))
        assert ours == pytest.approx(theirs[after:], abs=tolerance, rel=0), name


@pytest.mark.matrix
def test_data_parallel_ranks_train_as_one(data_parallel, one_rank):
    assert_same_training(data_parallel[0], one_rank[0])


@pytest.mark.matrix
def test_data_parallel_ranks_share_out_the_samples(data_parallel):
    """Every sample of the stream on one rank, in the iteration whose turn it is."""
    capture = data_parallel[1]
    assert not capture.problems
    for iteration in range(ITERATIONS):
        first = iteration * GLOBAL_BATCH
        records = [record for record in capture.records if record.iteration == iteration]
        samples = {
            rank: {sample for record in records if record.rank == rank for sample in record.sample_indices}
            for rank in (0, 1)
        }
        assert samples == {0: {first, first + 2}, 1: {first + 1, first + 3}}
    assert {(record.rank, record.parallel["dp_rank"]) for record in capture.records} == {(0, 0), (1, 1)}


@pytest.mark.matrix
def test_pipeline_stages_go_on_from_one_ranks_checkpoint(pipeline_parallel, one_rank):
    assert_same_training(pipeline_parallel[0], one_rank[0], after=SAVED)


@pytest.mark.matrix
def test_pipeline_stages_keep_global_layer_numbers(pipeline_parallel):
    capture = pipeline_parallel[1]
    assert not capture.problems
    layers = {(record.parallel["pp_rank"], record.layer_idx) for record in capture.records}
    assert layers == {(stage, stage) for stage in range(LAYERS)}  # as many stages as layers
    for record in capture.records:
        assert record.module.startswith(f"decoder.layers.{record.layer_idx}.")
    places = {(record.iteration, record.micro_batch, record.sample_indices[0]) for record in capture.records}
    assert places == {
        (iteration, micro_batch, iteration * GLOBAL_BATCH + micro_batch)
        for iteration in range(SAVED, ITERATIONS)
        for micro_batch in range(MICRO_BATCHES)
    }


@pytest.mark.matrix
def test_sequence_parallel_ranks_go_on_from_one_ranks_checkpoint(one_rank):
    """The norms see half the sequence each, and their gradients are added; the weights are split while loading."""
    flags = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--load", one_rank[1]]
    assert_same_training(pretrain(*FLAGS, *flags, ranks=2), one_rank[0], after=SAVED)


def test_fp16_finds_its_loss_scale_and_trains():
    """A scale that overflows is halved and the step left out, weights and schedule as they were."""
    flags = ["--fp16", "--initial-loss-scale", FIRST_SCALE, "--hysteresis", 1, "--train-iters", 8]
    run = pretrain(*flags)
    skipped = [int(count) for count in values(run, "number of skipped iterations")]
    scales = [float(scale) for scale in values(run, "loss scale")]
    rates = [float(rate) for rate in values(run, "learning rate")]
    bad = sum(skipped)
    assert 0 < bad < len(skipped) - 1
    assert skipped == [1] * bad + [0] * (len(skipped) - bad)
    assert scales == [FIRST_SCALE / 2 ** min(count, bad) for count in range(1, len(skipped) + 1)]
    assert len(set(rates[: bad + 1])) == 1
    assert rates[bad + 1] < rates[bad]
    assert float(run.losses[-1]) < float(run.losses[0]) - 0.1


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_a_world_that_does_not_fit_is_one_line(flag):
    result = launch(flag, 2)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "world size 1 is not a multiple" in result.stderr


def test_a_world_without_a_meeting_place_is_not_waited_for(parse, monkeypatch):
    """WORLD_SIZE left in the shell by another launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE is 2 and MASTER_ADDR is not set; start the ranks with torchrun"):
        initialize(parse())


def test_ranks_do_not_repeat_each_others_complaint(tmp_path):
    """Every rank finds out alike that TensorBoard's directory is a file; the first says so."""
    (tmp_path / "file").touch()
    result = launch("--tensorboard-dir", tmp_path / "file", ranks=2)
    complaints = [line for line in result.stderr.splitlines() if line.startswith("pretrain_gpt.py: error")]
    assert result.returncode != 0
    assert len(complaints) == 1
    assert f"--tensorboard-dir: {tmp_path / 'file'} can not be written" in complaints[0]
