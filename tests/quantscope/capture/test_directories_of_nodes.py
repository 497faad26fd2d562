"""A run whose nodes kept their tensors in directories of their own is read as one."""

import shutil

import pytest
import torch

from megatron.quantscope.capture import CaptureError, ParallelCoordinates, new_run_id, open_capture
from tests.quantscope.capture.conftest import ROWS_A_PASS, run_iteration

SHARED = {"tp_size": 2}


@pytest.fixture
def nodes(open_session, tmp_path):
    """`nodes(run_id)` -> the directories of two nodes with a rank each."""

    def keep(run_id):
        for rank, name in enumerate(("a", "b")):
            parallel = ParallelCoordinates(tp_rank=rank, **SHARED)
            directory = tmp_path / name / "logs"
            session = open_session(rank=rank, run_id=run_id, parallel=parallel, directory=directory)
            run_iteration(session, 0)
            session.close()
        return [tmp_path / name / "logs" for name in ("a", "b")]

    return keep


def rows(capture):
    return [(record.rank, record.counter, record.tensor_name, record.phase) for record in capture.records]


@pytest.mark.parametrize("folder", ["", "mxfp8"])
def test_it_is_the_capture_that_one_shared_directory_would_hold(nodes, tmp_path, folder):
    directories = [directory / folder for directory in nodes(new_run_id())]
    shared = tmp_path / "shared"
    for directory in directories:
        shutil.copytree(directory, shared / folder, dirs_exist_ok=True)
    apart, together = open_capture(directories), open_capture(shared / folder)
    assert rows(apart) == rows(together)
    assert len(apart.records) == 2 * ROWS_A_PASS
    assert [sum(record.path.is_relative_to(each) for record in apart.records) for each in directories] == [
        ROWS_A_PASS
    ] * 2
    assert (apart.commits, apart.runs) == (together.commits, together.runs)
    assert apart.run_info["mxfp8"]["run_id"] == together.run_info["mxfp8"]["run_id"]
    assert apart.problems == []
    assert apart.directory == tmp_path
    assert len(apart.frame()) == 2 * ROWS_A_PASS
    assert all(
        torch.equal(apart.load(one), together.load(other))
        for one, other in zip(apart.records, together.records, strict=True)
    )


def test_the_order_of_the_directories_does_not_matter(nodes):
    directories = nodes(new_run_id())
    assert rows(open_capture(directories)) == rows(open_capture(directories[::-1]))


def test_the_latest_run_is_one_for_all(nodes):
    older, newer = "20260101_000000_aaaaaa", "20260101_000001_bbbbbb"
    nodes(older)
    first, second = nodes(newer)
    shutil.rmtree(second / "mxfp8" / "runs" / newer)
    for path in second.glob("mxfp8/*.pt"):
        path.unlink()  # what the newer run kept would stand for itself
    capture = open_capture([first, second])
    assert {record.run_id for record in capture.records} == {newer}
    assert capture.problems == [f"b/logs/mxfp8/runs: nothing of run {newer}, which another directory has"]
    assert capture.runs == {"mxfp8": [older, newer]}


def test_a_copy_of_a_rank_is_refused(nodes, tmp_path):
    first, _ = nodes("20260101_000000_aaaaaa")
    shutil.copytree(first, tmp_path / "copy")
    with pytest.raises(CaptureError, match=r"rank 0 of run 20260101_000000_aaaaaa is in .* and in .*copy"):
        open_capture([first, tmp_path / "copy"])


def test_bad_input(nodes, tmp_path):
    first, _ = nodes(new_run_id())
    with pytest.raises(CaptureError, match=r"no such directory: .*nowhere"):
        open_capture([first, tmp_path / "nowhere"])
    with pytest.raises(CaptureError, match="no run x in"):
        open_capture(nodes("20260101_000000_aaaaaa"), run="x")
    with pytest.raises(CaptureError, match="no directory"):
        open_capture([])


def test_one_directory_spelled_twice_is_read_once(nodes, tmp_path):
    first, second = nodes(new_run_id())
    (tmp_path / "link").symlink_to(first)
    again = first.parent / ".." / first.parent.name / first.name
    assert rows(open_capture([first, again])) == rows(open_capture(first))
    several = open_capture([first, tmp_path / "link", second, again / "mxfp8"])
    assert rows(several) == rows(open_capture([first, second]))
