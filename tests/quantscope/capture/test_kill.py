"""SIGKILL at random points: nothing that was committed is lost or damaged, and the rest is told."""

import random
import signal
import time

import pytest
import torch

from megatron.quantscope.capture import CaptureError, open_capture
from tests.quantscope.capture.children import tensors_of
from tests.quantscope.capture.conftest import ROWS_A_PASS, block_exponents, check_readable, run_iteration

KINDS = {
    "pt": {"save_format": "pt"},
    "segment": {"save_format": "segment"},
    "pt with blocks": {"save_format": "pt", "mode": "both"},
    "segment with blocks": {"save_format": "segment", "mode": "both"},
}
KILLS = [("pt", number) for number in range(16)]
KILLS += [("segment", number) for number in range(16)]
KILLS += [(kind, number) for kind in ("pt with blocks", "segment with blocks") for number in range(9)]
LATEST = 10  # commits that are awaited
LATEST_S = 0.03  # what passes then
TOLD = ("was not completed", "unfinished", "is broken and left out", "no manifest lists it", "kept nothing")


def unfinished_files(directory):
    return sorted(path.name for path in directory.rglob(".writing-*"))


def check(directory, reported):
    """What a killed run left, of which `reported` iterations were known to be on disk."""
    unfinished = unfinished_files(directory)
    try:
        capture = open_capture(directory)
    except CaptureError:  # there are none
        assert reported == 0
        return 0
    committed = sorted(capture.commits.get("mxfp8", {}))
    assert committed == list(range(len(committed)))
    assert len(committed) >= reported
    kept = [record for record in capture.records if record.committed and not record.bare]
    assert [record.iteration for record in kept] == [i for i in committed for _ in range(ROWS_A_PASS)]
    for record in capture.records:
        expected = tensors_of(record.iteration)[record.tensor_name]
        assert torch.equal(capture.load(record), expected)
        if record.blocks is not None:
            assert torch.equal(capture.block_exponents(record), block_exponents(expected))
    assert all(any(words in problem for words in TOLD) for problem in capture.problems), capture.problems
    assert bool(unfinished) == any("unfinished" in problem for problem in capture.problems)
    left = {record.iteration for record in capture.records if not record.committed}
    for iteration in left:
        assert any(f"iteration {iteration} of rank 0 was not completed" in problem for problem in capture.problems)
    return len(committed)


def test_there_are_fifty():
    assert len(KILLS) == 50


@pytest.mark.parametrize(("kind", "number"), KILLS)
def test_nothing_committed_is_lost(children, tmp_path, kind, number):
    choice = random.Random(f"{kind} {number}")
    awaited, moment = choice.randint(0, LATEST), choice.uniform(0, LATEST_S)
    children.start("endless", tmp_path / "capture", **KINDS[kind])
    while awaited and children.await_line("committed") < awaited:
        pass
    time.sleep(moment)
    children.send(signal.SIGKILL)
    status, said = children.end()
    assert status == -signal.SIGKILL
    reported = max([awaited, *(line["committed"] for line in said if "committed" in line)])
    if (tmp_path / "capture").exists():
        check(tmp_path / "capture", reported)
    else:
        assert reported == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_run_in_the_same_folder_reads_as_itself(children, tmp_path, open_session, kind):
    children.start("endless", tmp_path / "capture", **KINDS[kind])
    while children.await_line("committed") < 5:
        pass
    children.send(signal.SIGKILL)
    children.end()
    committed = check(tmp_path / "capture", 5)
    session = open_session(**KINDS[kind])
    run_iteration(session, 0)
    session.close()
    after = open_capture(session.config.directory)
    assert {record.run_id for record in after.records} == {session.identity["run_id"]}
    assert len(after.records) == ROWS_A_PASS
    check_readable(after)
    before = open_capture(session.config.directory, run="20250101_000000_aaaaaa")
    assert len(before.commits["mxfp8"]) == committed


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_ends_without_close_loses_nothing(children, tmp_path, kind):
    children.start("without_close", tmp_path, **KINDS[kind])
    status, _ = children.end()
    assert status == 0
    capture = open_capture(tmp_path)
    assert capture.problems == []
    assert sorted(capture.commits["mxfp8"]) == [0, 1, 2]
    assert len(capture.records) == 3 * ROWS_A_PASS
    check_readable(capture, tensors_of)
