"""SIGTERM and SIGINT: what was handed over reaches the disk, and the process ends by the signal as it would have."""

import json
import os
import signal
import socket
import threading
import time

import pytest

from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.termination import TerminationWatch
from tests.quantscope.capture.children import RUN_ID, tensors_of
from tests.quantscope.capture.conftest import ROWS_A_PASS, check_readable

KINDS = {
    "pt": {"save_format": "pt"},
    "segment": {"save_format": "segment"},
    "both": {"save_format": "segment", "mode": "both"},
    "statistics": {"mode": "statistics"},
}


def ends_of(directory):
    """The manifest's lines on how the run ended."""
    path = directory / "mxfp8" / "runs" / RUN_ID / "manifest_rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["kind"], line.get("reason")) for line in lines if line["kind"] in ("stopped", "closed")]


def check(directory, ended):
    """Every iteration that had ended is complete, and what came of the one that ran is readable."""
    capture = open_capture(directory)
    assert sorted(capture.commits["mxfp8"]) == list(range(ended + 1)) or sorted(capture.commits["mxfp8"]) == list(
        range(ended + 2)
    )  # the signal may come between an iteration's end and the word of it
    committed = [record for record in capture.records if record.committed]
    assert len(committed) == ROWS_A_PASS * len(capture.commits["mxfp8"])
    check_readable(capture, tensors_of)
    assert not any("unfinished" in problem or "missing" in problem for problem in capture.problems)
    assert list(directory.rglob(".writing-*")) == []
    return capture


def last_ended(before, said):
    return max([before, *(line["ended"] for line in said if "ended" in line)])


@pytest.mark.parametrize("moment", [0.0, 0.013, 0.031])
@pytest.mark.parametrize("kind", KINDS)
def test_sigterm_flushes_and_ends_the_process_by_the_signal(children, tmp_path, kind, moment):
    children.start("endless", tmp_path, **KINDS[kind])
    before = children.await_line("ended")
    time.sleep(moment)
    children.send(signal.SIGTERM)
    status, said = children.end()
    assert status == -signal.SIGTERM
    capture = check(tmp_path, last_ended(before, said))
    assert ends_of(tmp_path) == [("stopped", "the process was terminated")]
    assert any("the process was terminated" in problem for problem in capture.problems)


def test_sigterm_while_the_training_waits_for_room(children, tmp_path):
    """The main thread holds the session's lock just then, and must not be needed for the flush."""
    children.start("waiting_for_room", tmp_path)
    before = children.await_line("ended")
    time.sleep(0.06)
    children.send(signal.SIGTERM)
    status, said = children.end()
    assert status == -signal.SIGTERM
    check(tmp_path, last_ended(before, said))


def test_sigterm_during_the_last_close(children, tmp_path):
    children.start("during_the_last_close", tmp_path)
    children.await_line("closing")
    children.send(signal.SIGTERM)
    status, _ = children.end()
    assert status == -signal.SIGTERM
    check(tmp_path, 2)


@pytest.mark.parametrize("kind", ["pt", "segment"])
def test_sigterm_with_the_main_thread_stuck_in_c(children, tmp_path, kind):
    children.start("stuck_in_c", tmp_path, **KINDS[kind])
    children.await_line("stuck")
    children.send(signal.SIGTERM)
    status, _ = children.end()
    assert status == 128 + signal.SIGTERM
    assert len(check(tmp_path, 2).records) == 3 * ROWS_A_PASS
    assert ends_of(tmp_path) == [("stopped", "the process was terminated")]


@pytest.mark.parametrize("when", ["before", "after"])
def test_somebody_else_s_handler_is_left_alone(children, tmp_path, when):
    children.start(f"own_handler_{when}", tmp_path)
    before = children.await_line("ended")
    children.send(signal.SIGTERM)
    status, said = children.end()
    assert status == 7
    assert {"handled": signal.SIGTERM} in said
    check(tmp_path, last_ended(before, said))
    [(kind, reason)] = ends_of(tmp_path)  # at the interpreter's end
    assert kind == "closed" or "the training ended within iteration" in reason


@pytest.mark.parametrize("kind", ["pt", "segment"])
def test_sigint_unwinds_and_flushes(children, tmp_path, kind, capfd):
    children.start("endless", tmp_path, **KINDS[kind])
    before = children.await_line("ended")
    children.send(signal.SIGINT)
    status, said = children.end()
    assert status in (-signal.SIGINT, 1)
    check(tmp_path, last_ended(before, said))


def test_forked_children_have_nothing_to_do_with_it(children, tmp_path):
    """One is terminated, one ends as interpreters do; the run goes on."""
    children.start("forks", tmp_path, save_format="segment")
    assert children.await_line("forked") == [-signal.SIGTERM, 5]
    status, _ = children.end()
    assert status == 0
    capture = open_capture(tmp_path)
    assert capture.problems == []
    assert sorted(capture.commits["mxfp8"]) == [0, 1]
    assert len(capture.records) == 2 * ROWS_A_PASS
    assert ends_of(tmp_path) == [("closed", None)]


class TestWatch:
    @pytest.fixture(autouse=True)
    def default_handler(self):
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
        signal.signal(signal.SIGTERM, before)
        assert signal.set_wakeup_fd(-1) == -1

    def installed(self):
        return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL

    def watching(self):
        return [thread.name for thread in threading.enumerate()].count("capture-termination")

    def test_removing_leaves_no_trace(self):
        descriptors, watching = len(os.listdir("/proc/self/fd")), self.watching()
        for _ in range(3):
            watch = TerminationWatch(lambda: None)
            watch.install()
            assert self.installed()
            assert self.watching() == watching + 1
            watch.remove()
            watch.remove()
            assert not self.installed()
            end = time.monotonic() + 10
            while self.watching() > watching:
                assert time.monotonic() < end
                time.sleep(0.001)
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_a_handler_that_is_there_stays(self):
        def mine(number, frame):
            pass

        signal.signal(signal.SIGTERM, mine)
        watch = TerminationWatch(lambda: None)
        watch.install()
        assert signal.getsignal(signal.SIGTERM) is mine
        watch.remove()
        assert signal.getsignal(signal.SIGTERM) is mine

    def test_an_ignored_signal_stays_ignored(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        TerminationWatch(lambda: None).install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    def test_a_handler_that_comes_later_stays(self):
        def mine(number, frame):
            pass

        watch = TerminationWatch(lambda: None)
        watch.install()
        signal.signal(signal.SIGTERM, mine)
        watch.remove()
        assert signal.getsignal(signal.SIGTERM) is mine

    def test_an_event_loop_keeps_its_pipe(self):
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno())
        try:
            watch = TerminationWatch(lambda: None)
            watch.install()
            assert not self.installed()
            watch.remove()
        finally:
            assert signal.set_wakeup_fd(-1) == writing.fileno()
            reading.close()
            writing.close()

    def test_only_the_main_thread_installs_it(self):
        thread = threading.Thread(target=TerminationWatch(lambda: None).install)
        thread.start()
        thread.join()
        assert not self.installed()
