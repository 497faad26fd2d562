"""The layout of a checkpoint directory, and what a killed writer leaves."""

import pytest

from megatron.training.checkpoint_directory import Checkpoint, being_written, complete, latest, path_of, prepare
from megatron.training.failure import UsageError

NAMED = "latest_checkpointed_iteration.txt"


def write(directory, name, content):
    prepare(directory, name)
    (being_written(directory, name) / "common.pt").write_text(content)
    complete(directory, name)


def test_nothing_there(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "folder", "iteration", "release"),
    [
        ("100", "iter_0000100", 100, False),
        ("12345678", "iter_12345678", 12345678, False),
        ("release", "release", 0, True),
    ],
)
def test_layout_is_megatrons(tmp_path, name, folder, iteration, release):
    write(tmp_path, name, "weights")
    assert (tmp_path / folder / "common.pt").read_text() == "weights"
    assert (tmp_path / NAMED).read_text() == name
    assert latest(tmp_path) == Checkpoint(tmp_path / folder, iteration, release)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder, NAMED])


def test_a_directory_that_megatron_wrote(tmp_path):
    (tmp_path / NAMED).write_text("20\n")
    (tmp_path / "iter_0000020").mkdir()
    assert latest(tmp_path) == Checkpoint(tmp_path / "iter_0000020", 20, False)


@pytest.mark.parametrize("name", ["", "newest", "-3", "1.5", "../1"])
def test_name_that_is_none(tmp_path, name):
    (tmp_path / NAMED).write_text(name)
    with pytest.raises(UsageError, match="allowed are a number of iterations and 'release'") as caught:
        latest(tmp_path)
    assert repr(name) in str(caught.value)


def test_named_checkpoint_is_gone(tmp_path):
    (tmp_path / NAMED).write_text("7")
    with pytest.raises(UsageError, match="names iter_0000007, which is not there"):
        latest(tmp_path)


def test_killed_while_writing_leaves_the_previous_one_in_force(tmp_path):
    write(tmp_path, "1", "first")
    prepare(tmp_path, "2")
    (being_written(tmp_path, "2") / "common.pt").write_text("half")
    assert latest(tmp_path).iteration == 1
    assert not path_of(tmp_path, "2").exists()
    write(tmp_path, "2", "second")  # the next start meets the remains
    assert (latest(tmp_path).path / "common.pt").read_text() == "second"


def test_same_iteration_again_replaces_it_whole(tmp_path):
    write(tmp_path, "4", "old")
    (tmp_path / ".iter_0000004.replaced" / "of_a_killed_run").mkdir(parents=True)
    (path_of(tmp_path, "4") / "left_over").touch()
    write(tmp_path, "4", "new")
    assert [path.name for path in path_of(tmp_path, "4").iterdir()] == ["common.pt"]
    assert (path_of(tmp_path, "4") / "common.pt").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["iter_0000004", NAMED])
