"""The layout of a checkpoint directory, and what a killed writer leaves."""

import os
import shutil
from pathlib import Path

import pytest

from megatron.training.checkpoint.checkpoint_directory import (
    Checkpoint,
    being_written,
    chosen,
    complete,
    discard,
    latest,
    path_of,
    prepare,
)
from megatron.training.failure import UsageError

NAMED = "latest_checkpointed_iteration.txt"
WRITER, KILLED = "this", "that"


def write(directory, name, content, **options):
    prepare(directory, name, WRITER)
    (being_written(directory, name, WRITER) / "common.pt").write_text(content)
    complete(directory, name, WRITER, **options)


def content_of(checkpoint):
    return (checkpoint.path / "common.pt").read_text()


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def killed_at(monkeypatch):
    """`killed_at(step)`: from now on the step-th change of the directory, from 0, does not happen, nor any after it."""

    def arm(step):
        changes = iter(range(1000))

        def killing(change):
            def changed(*arguments, **options):
                if next(changes) >= step:
                    raise KilledError
                return change(*arguments, **options)

            return changed

        for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "write_text"), (shutil, "rmtree")):
            monkeypatch.setattr(owner, name, killing(getattr(owner, name)))

    return arm


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
    prepare(tmp_path, "2", KILLED)
    (being_written(tmp_path, "2", KILLED) / "common.pt").write_text("half")
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


CHANGES = (
    6  # of completing a checkpoint that replaces one: remains, set aside, name, tracker (written, moved), set aside
)


@pytest.mark.parametrize("step", range(CHANGES))
def test_killed_while_replacing_leaves_one_of_the_two_in_force(tmp_path, killed_at, monkeypatch, step):
    write(tmp_path, "4", "old")
    prepare(tmp_path, "4", KILLED)
    (being_written(tmp_path, "4", KILLED) / "common.pt").write_text("new")
    killed_at(step)
    with pytest.raises(KilledError):
        complete(tmp_path, "4", KILLED)
    monkeypatch.undo()
    assert content_of(latest(tmp_path)) == ("old" if step < 3 else "new")
    before = content_of(latest(tmp_path))
    prepare(tmp_path, "5", WRITER)
    assert content_of(latest(tmp_path)) == before, "the next save begins"
    assert latest(tmp_path).path == path_of(tmp_path, "4")
    (being_written(tmp_path, "5", WRITER) / "common.pt").write_text("next")
    complete(tmp_path, "5", WRITER)
    assert content_of(latest(tmp_path)) == "next"
    assert content_of(chosen(tmp_path, 4)) == before
    remains = [path.name for path in tmp_path.iterdir() if path.name.startswith(".iter")]
    assert not remains


def test_a_process_that_outlives_its_run_does_not_write_into_its_successors_checkpoint(tmp_path):
    prepare(tmp_path, "2", KILLED)
    prepare(tmp_path, "2", WRITER)
    assert os.listdir(tmp_path) == [being_written(tmp_path, "2", WRITER).name]
    with pytest.raises(FileNotFoundError):
        (being_written(tmp_path, "2", KILLED) / "__0_0.distcp").write_text("of the outliving process")


def test_discarded_leaves_nothing(tmp_path):
    write(tmp_path, "1", "first")
    prepare(tmp_path, "2", WRITER)
    discard(tmp_path, "2", WRITER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", NAMED]


def test_only_every_nth_and_the_latest_are_kept(tmp_path):
    for iteration in range(1, 8):
        write(tmp_path, str(iteration), "weights", retain=3)
        assert latest(tmp_path).iteration == iteration
    assert sorted(path.name for path in tmp_path.glob("iter*")) == ["iter_0000003", "iter_0000006", "iter_0000007"]


def test_a_run_that_went_back_does_not_remove_what_lies_ahead(tmp_path):
    for iteration in (2, 4):
        write(tmp_path, str(iteration), "weights")
    write(tmp_path, "3", "from 2 on", retain=10)
    assert sorted(path.name for path in tmp_path.glob("iter*")) == ["iter_0000002", "iter_0000003", "iter_0000004"]
    assert latest(tmp_path).iteration == 3


def test_the_checkpoint_of_an_iteration(tmp_path):
    for iteration in (2, 4):
        write(tmp_path, str(iteration), str(iteration))
    assert content_of(chosen(tmp_path, 2)) == "2"
    assert chosen(tmp_path, None) == latest(tmp_path)
    with pytest.raises(UsageError, match=r"--ckpt-step 3: not in .*, which has 2, 4"):
        chosen(tmp_path, 3)
    with pytest.raises(UsageError, match="which has none"):
        chosen(tmp_path / "nowhere", 3)
