"""Save, stop and go on: a resumed run repeats the digits of one that never stopped, with dropout and in bf16."""

import json
import shutil

import pytest
import torch

from tests.end_to_end.conftest import LAYERS, launch, pretrain
from tests.training.log_lines import iterations, values

ITERATIONS, SAVED = 4, 2
CHECKPOINTS = [f"iter_{iteration:07d}" for iteration in range(SAVED, ITERATIONS + 1, SAVED)]
LATEST = "latest_checkpointed_iteration.txt"
# Dropout makes the losses depend on the random state, not on weights and samples alone.
FLAGS = ["--bf16", "--attention-dropout", 0.1, "--hidden-dropout", 0.1, "--train-iters", ITERATIONS]
TINY_FILE_BYTES = 100 * 1024  # the small model's shards do not fit, what a run writes beside them does


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(run, directory): the uninterrupted run, with the checkpoints of the middle and of the end."""
    directory = tmp_path_factory.mktemp("whole")
    return pretrain(*FLAGS, "--save", directory, "--save-interval", SAVED), directory


@pytest.fixture
def stopped(whole, tmp_path):
    """The directory as a run leaves it that is killed before its second checkpoint is named the latest."""
    directory = tmp_path / "stopped"
    shutil.copytree(whole[1], directory, ignore=shutil.ignore_patterns(CHECKPOINTS[-1]))
    (directory / LATEST).write_text(str(SAVED))
    return directory


def test_the_layout_is_megatrons(whole):
    run, directory = whole
    assert iterations(run) == list(range(1, ITERATIONS + 1))
    assert sorted(path.name for path in directory.iterdir()) == [*CHECKPOINTS, LATEST, "model.json"]
    assert (directory / LATEST).read_text() == str(ITERATIONS)
    model = json.loads((directory / "model.json").read_text())
    assert (model["num_layers"], model["swiglu"], model["position_embedding_type"]) == (LAYERS, True, "rope")


def test_a_resumed_run_repeats_every_digit(whole, stopped):
    uninterrupted, directory = whole
    resumed = pretrain(*FLAGS, "--load", stopped, "--save", stopped)
    assert iterations(resumed) == list(range(SAVED + 1, ITERATIONS + 1))
    for name in ("lm loss", "grad norm", "learning rate", "consumed samples"):
        assert values(resumed, name) == values(uninterrupted, name)[SAVED:], name
    assert len(set(uninterrupted.losses)) == ITERATIONS
    assert sorted(path.name for path in stopped.iterdir()) == sorted(path.name for path in directory.iterdir())
    assert (stopped / LATEST).read_text() == str(ITERATIONS)


def test_without_the_optimizers_state_only_the_next_loss_is_the_same(whole, stopped):
    """Weights, samples and random state give the loss; Adam's moments and the schedule start anew."""
    uninterrupted, _ = whole
    resumed = pretrain(*FLAGS, "--load", stopped, "--no-load-optim")
    assert iterations(resumed) == list(range(SAVED + 1, ITERATIONS + 1))
    assert resumed.losses[0] == uninterrupted.losses[SAVED]
    assert resumed.losses[1] != uninterrupted.losses[SAVED + 1]


@pytest.mark.matrix
def test_without_a_random_state_everything_else_goes_on(stopped, tmp_path):
    """Written without it, a checkpoint still gives weights, moments, schedules and the place in the data."""
    without_dropout = [*FLAGS, "--attention-dropout", 0, "--hidden-dropout", 0]
    whole = pretrain(*without_dropout, "--load", stopped, "--save", tmp_path, "--save-interval", 3, "--no-save-rng")
    shutil.rmtree(tmp_path / CHECKPOINTS[-1])
    (tmp_path / LATEST).write_text("3")
    resumed = pretrain(*without_dropout, "--load", tmp_path)
    assert "iter_0000003: weights, optimizer and schedules\n" in resumed.output
    assert resumed.losses == whole.losses[-1:]


def test_another_trainers_checkpoint_gives_its_weights_alone(stopped):
    """megatron-core's layout is common to several trainers; what says how far training had come is not."""
    common = stopped / CHECKPOINTS[0] / "common.pt"
    contents = torch.load(common, weights_only=True)
    del contents["consumed_train_samples"]
    torch.save(contents, common)
    result = launch(*FLAGS, "--load", stopped)
    assert result.returncode == 1
    assert "another trainer" in result.stderr
    assert "consumed_train_samples is missing" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_finetune_takes_the_weights_and_the_architecture_alone(whole, tmp_path):
    """The command line asks for one layer more than --use-checkpoint-args finds in model.json."""
    uninterrupted, directory = whole
    flags = ["--finetune", "--use-checkpoint-args", "--num-layers", LAYERS + 1, "--train-iters", 1]
    tuned = pretrain("--bf16", *flags, "--load", directory, "--save", tmp_path)
    assert iterations(tuned) == [1]
    assert values(tuned, "consumed samples") == values(uninterrupted, "consumed samples")[:1]
    assert float(tuned.losses[0]) < min(map(float, uninterrupted.losses))  # trained weights, samples seen, no dropout
    assert json.loads((tmp_path / "model.json").read_text())["num_layers"] == LAYERS
    assert (tmp_path / LATEST).read_text() == "1"


REFUSED = [
    (["--ckpt-step", 3], "--ckpt-step 3: not in "),
    (["--num-layers", LAYERS + 1], f"num_layers is {LAYERS} there and {LAYERS + 1} here"),
]


@pytest.mark.parametrize(("flags", "complaint"), REFUSED, ids=[str(flags[0]) for flags, _ in REFUSED])
def test_what_can_not_be_resumed_is_refused_in_one_line(whole, flags, complaint):
    result = launch(*FLAGS, *flags, "--load", whole[1])
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert complaint in result.stderr


def test_an_earlier_checkpoint_can_be_chosen_and_few_are_kept(whole, tmp_path):
    uninterrupted, directory = whole
    shutil.copytree(directory, tmp_path / "copy")
    flags = ["--load", tmp_path / "copy", "--save", tmp_path / "copy", "--save-interval", 1, "--ckpt-step", SAVED]
    again = pretrain(*FLAGS, *flags, "--save-retain-interval", SAVED)
    assert iterations(again) == list(range(SAVED + 1, ITERATIONS + 1))
    assert again.losses == uninterrupted.losses[SAVED:]
    assert f"saved checkpoint of iteration {SAVED + 1} in" in again.output
    assert sorted(path.name for path in (tmp_path / "copy").glob("iter*")) == CHECKPOINTS


def test_a_checkpoint_that_can_not_be_written_leaves_the_one_before(whole, stopped):
    """A file size limit stands for the full disk: writing fails in the middle of a shard."""
    resource = pytest.importorskip("resource")
    before = sorted(path.name for path in stopped.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (TINY_FILE_BYTES, limits[1]))
    try:
        result = launch(*FLAGS, "--load", stopped, "--save", stopped)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"error: the checkpoint can not be written to {stopped}: " in result.stderr.splitlines()[-1]
    assert sorted(path.name for path in stopped.iterdir()) == before
    assert (stopped / LATEST).read_text() == str(SAVED)
