"""The cache: where it is, and that what it holds is whole."""

import multiprocessing
import time
from pathlib import Path

import pytest

from script.data import cache as subject
from script.data.command_line import InputError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"QUANTSCOPE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/quantscope"),
        ({"HOME": "/home/x"}, "/home/x/.cache/quantscope"),
    ],
)
def test_place(monkeypatch, environment, expected):
    for name in ("QUANTSCOPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert subject.cache_dir() == Path(expected)


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / "made"
    with subject.staged_directory(target) as directory:
        (directory / "a").write_text("old")
    with pytest.raises(FileNotFoundError), subject.staged_directory(target) as directory:
        (directory / "absent" / "a").write_text("new")
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_success_replaces_what_was_there(tmp_path):
    target = tmp_path / "made"
    for content in ("old", "new"):
        with subject.staged_directory(target) as directory:
            assert not list(directory.iterdir())
            (directory / "a").write_text(content)
    assert (target / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("restorable", [True, False])
def test_stopped_between_the_two_renames(tmp_path, monkeypatch, restorable):
    """What was there is in its place again; if even that fails, it is where it was set aside."""
    target = tmp_path / "made"
    with subject.staged_directory(target) as directory:
        (directory / "a").write_text("old")
    rename = Path.rename

    def stop(self, to):
        if self.name == "new" or (to == target and not restorable):
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt), subject.staged_directory(target) as directory:
        (directory / "a").write_text("new")
    if restorable:
        assert (target / "a").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["made"]
    else:
        assert [path.read_text() for path in tmp_path.glob(".made.*.tmp/old/a")] == ["old"]


def test_what_a_killed_program_left_is_removed(tmp_path):
    for name in (".made.abc.tmp", ".other.abc.tmp", "made"):
        (tmp_path / name / "new").mkdir(parents=True)
    subject.discard_abandoned(tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.abc.tmp", "made"]


def test_a_cache_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="QUANTSCOPE_CACHE to another directory") as caught,
        subject.locked(tmp_path / "file" / "cache"),
    ):
        pytest.fail("got the lock")
    assert str(tmp_path / "file") in str(caught.value)


def _hold(directory, held):
    with subject.locked(directory):
        held.set()
        time.sleep(60)


def test_lock_is_exclusive_and_dies_with_its_holder(tmp_path):
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, held))
    holder.start()
    assert held.wait(30)
    taken = context.Event()
    waiter = context.Process(target=_hold, args=(tmp_path, taken))
    waiter.start()
    assert not taken.wait(1)
    holder.kill()
    assert taken.wait(30)
    waiter.kill()
    holder.join()
    waiter.join()
