"""Writing in the background: named when it is whole, not before; and a failure in one line, with nothing left."""

import os
import queue
from pathlib import Path

import pytest
import torch

from megatron.training.checkpoint import checkpoint_directory
from megatron.training.checkpoint.checkpoint_writer import CheckpointWriter, _Results
from megatron.training.failure import TrainingError

FILES = {".metadata", "metadata.json", "__0_0.distcp"}


@pytest.fixture
def writes(one_rank):
    """`writes(writer, directory, name, value=0.0)`: write a checkpoint of one tensor, which is returned."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def write(writer, directory, name, value=0.0):
        tensor = torch.full((1000,), value)
        contents = {"weight": ShardedTensor.from_rank_offsets("weight", tensor), "iteration": int(name)}
        writer.write(directory, name, contents, architecture={"num_layers": 1}, metadata={})
        return tensor

    return write


def read(directory):
    from megatron.core import dist_checkpointing

    path = checkpoint_directory.latest(directory).path
    return dist_checkpointing.load_plain_tensors(str(path))["weight"]


def writes_and_waits(writes, writer, directory):
    writes(writer, directory, "2")
    writer.finish()


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_in_the_background_it_is_named_when_it_is_whole(writes, tmp_path):
    writer = CheckpointWriter(in_background=True)
    tensor = writes(writer, tmp_path, "1", 5.0)
    assert checkpoint_directory.latest(tmp_path) is None
    tensor.fill_(6.0)  # the next iteration
    writer.finish()
    assert checkpoint_directory.latest(tmp_path).iteration == 1
    assert read(tmp_path).tolist() == [5.0] * 1000
    assert {path.name for path in (tmp_path / "iter_0000001").iterdir()} >= FILES
    writer.finish()
    writer.poll()


@pytest.mark.parametrize("in_background", [False, True])
def test_who_asks_is_told_when_it_is_complete(writes, tmp_path, in_background):
    told = []
    writer = CheckpointWriter(
        in_background=in_background,
        on_complete=lambda name: told.append((name, checkpoint_directory.latest(tmp_path).iteration)),
    )
    writes(writer, tmp_path, "1")
    assert told == ([] if in_background else [("1", 1)])
    writer.finish()
    assert told == [("1", 1)]


def test_polling_does_not_wait(writes, tmp_path):
    writer = CheckpointWriter(in_background=True)
    writes(writer, tmp_path, "1")
    while checkpoint_directory.latest(tmp_path) is None:
        writer.poll()
    assert [path.name for path in tmp_path.glob(".iter*")] == []


def test_one_after_the_other(writes, tmp_path):
    writer = CheckpointWriter(in_background=True)
    for name in ("1", "2"):
        writes(writer, tmp_path, name, float(name))
    assert checkpoint_directory.latest(tmp_path).iteration == 1, "the second waited for the first"
    writer.finish()
    assert read(tmp_path)[0] == 2.0


@pytest.mark.parametrize("in_background", [False, True])
def test_what_can_not_be_written_leaves_the_one_before(writes, tmp_path, monkeypatch, in_background):
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writes(CheckpointWriter(), tmp_path, "1", 1.0)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem_async, "_write_item", fail)
    writer = CheckpointWriter(in_background=in_background)
    with pytest.raises(TrainingError, match=r"can not be written to .*No space left on device") as caught:
        writes_and_waits(writes, writer, tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert checkpoint_directory.latest(tmp_path).iteration == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        checkpoint_directory.LATEST,
        "model.json",
    ]
    monkeypatch.undo()
    writes(writer, tmp_path, "3", 3.0)
    writer.finish()
    assert read(tmp_path)[0] == 3.0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_no_process_stays(writes, tmp_path):
    before = children()
    writer = CheckpointWriter(in_background=True)
    writes(writer, tmp_path, "1")
    writer.finish()
    assert set(children()) <= set(before)


def test_results_come_back_from_a_fork():
    results = _Results()
    with pytest.raises(queue.Empty):
        results.get_nowait()
    long = {"names": ["name"] * 100_000}  # more than a pipe holds
    for _ in range(2):
        process = os.fork()
        if not process:
            results.put(long)
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0
        assert results.get_nowait() == long
        with pytest.raises(queue.Empty):
            results.get_nowait()
