"""Background writing: bounded bytes, tasks in order, errors that surface; and when an iteration is complete."""

import threading
import time

import pytest

from megatron.quantscope.capture import CaptureError
from megatron.quantscope.capture.ledger import IterationLedger
from megatron.quantscope.capture.writer import THREADS, BackgroundWriter

PATIENCE_S = 10


@pytest.fixture
def errors():
    return []


@pytest.fixture
def open_writer(errors):
    writers = []

    def open_(limit):
        writers.append(BackgroundWriter(limit, errors.append))
        return writers[-1]

    yield open_
    for writer in writers:
        writer.close()


class TestBackgroundWriter:
    def test_runs_everything_before_close_returns(self, open_writer):
        writer, done = open_writer(100), []
        for number in range(200):
            writer.reserve(10)
            writer.submit(10, lambda number=number: done.append(number))
        writer.close()
        writer.close()
        assert sorted(done) == list(range(200))

    def test_waits_for_room_and_no_longer(self, open_writer):
        writer, gate = open_writer(100), threading.Event()
        for _ in range(THREADS):
            writer.reserve(50)
            writer.submit(50, gate.wait)
        waiting = threading.Thread(target=lambda: writer.reserve(1))
        waiting.start()
        time.sleep(0.05)
        assert waiting.is_alive()  # 100 of 100 bytes are held
        gate.set()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        assert writer.waited_seconds > 0.04
        assert writer.peak_bytes == 100
        writer.release(1)

    def test_the_bound_holds_for_any_sizes(self, open_writer):
        writer, held, peaks, lock = open_writer(1000), [0], [], threading.Lock()

        def task(size):
            with lock:
                held[0] -= size

        for size in (300, 999, 1, 500, 501, 700, 42) * 20:
            writer.reserve(size)
            with lock:
                held[0] += size
                peaks.append(held[0])
            writer.submit(size, lambda size=size: task(size))
        writer.close()
        assert writer.peak_bytes <= 1000
        assert max(peaks) <= 1000

    def test_what_is_larger_than_the_bound_goes_alone(self, open_writer):
        writer, gate, order = open_writer(100), threading.Event(), []
        writer.reserve(60)
        writer.submit(60, gate.wait)
        large = threading.Thread(target=lambda: (writer.reserve(500), order.append("large")))
        large.start()
        time.sleep(0.05)
        assert order == []
        gate.set()
        large.join(PATIENCE_S)
        assert order == ["large"]
        writer.release(500)

    def test_tasks_start_in_order(self, open_writer):
        """A task that waits for an earlier one never waits for ever."""
        writer, events = open_writer(10**6), [threading.Event() for _ in range(100)]

        def task(number):
            if number:
                assert events[number - 1].wait(PATIENCE_S)
            events[number].set()

        for number in range(100):
            writer.reserve(1)
            writer.submit(1, lambda number=number: task(number))
        writer.close()
        assert all(event.is_set() for event in events)

    def test_an_error_is_told_and_frees_its_bytes(self, open_writer, errors):
        writer, done = open_writer(10), []

        def bad():
            raise OSError("disk on fire")

        for task in (bad, lambda: done.append(1), bad, lambda: done.append(2)):
            writer.reserve(10)
            writer.submit(10, task)
        writer.close()
        assert [str(error) for error in errors] == ["disk on fire"] * 2
        assert done == [1, 2]


class TestLedger:
    def test_commits_when_ended_and_on_disk(self):
        commits = []
        ledger = IterationLedger(commits.append)
        ledger.handed_over(3)
        ledger.handed_over(3)
        ledger.on_disk(3, 100)
        ledger.ended(3, {"lm loss": 2.5})
        assert commits == []
        ledger.on_disk(3, None)
        assert commits == [{"iteration": 3, "rows": 2, "files": 1, "bytes": 100, "scalars": {"lm loss": 2.5}}]
        assert vars(ledger.total) == {"rows": 2, "files": 1, "bytes": 100}

    def test_an_iteration_that_is_on_disk_already_commits_at_its_end(self):
        commits = []
        ledger = IterationLedger(commits.append)
        ledger.handed_over(0)
        ledger.on_disk(0, 7)
        ledger.ended(0, {})
        ledger.ended(1, {})
        assert [(commit["iteration"], commit["rows"]) for commit in commits] == [(0, 1), (1, 0)]

    def test_a_running_iteration_is_never_committed(self):
        commits = []
        ledger = IterationLedger(commits.append)
        ledger.handed_over(0)
        ledger.on_disk(0, 7)
        assert commits == []

    def test_a_row_after_the_end_is_an_error(self):
        ledger = IterationLedger(lambda fields: None)
        ledger.ended(4, {})
        with pytest.raises(CaptureError, match="iteration 4 was shown after the iteration's end"):
            ledger.handed_over(4)
