"""Background writing: tasks in order, errors that surface; and when an iteration is complete."""

import threading

import pytest

from megatron.quantscope.capture import CaptureError
from megatron.quantscope.capture.ledger import IterationLedger
from megatron.quantscope.capture.writer import BackgroundWriter

PATIENCE_S = 10


@pytest.fixture
def errors():
    return []


@pytest.fixture
def writer(errors):
    writer = BackgroundWriter(errors.append)
    yield writer
    writer.close()


class TestBackgroundWriter:
    def test_runs_everything_before_close_returns(self, writer):
        done = []
        for number in range(200):
            writer.submit(lambda number=number: done.append(number))
        writer.close()
        writer.close()
        assert sorted(done) == list(range(200))

    def test_tasks_start_in_order(self, writer):
        """A task that waits for an earlier one never waits for ever."""
        events = [threading.Event() for _ in range(100)]

        def task(number):
            if number:
                assert events[number - 1].wait(PATIENCE_S)
            events[number].set()

        for number in range(100):
            writer.submit(lambda number=number: task(number))
        writer.close()
        assert all(event.is_set() for event in events)

    def test_an_error_is_told_and_the_next_task_runs(self, writer, errors):
        done = []

        def bad():
            raise OSError("disk on fire")

        for task in (bad, lambda: done.append(1), bad, lambda: done.append(2)):
            writer.submit(task)
        writer.close()
        assert [str(error) for error in errors] == ["disk on fire"] * 2
        assert sorted(done) == [1, 2]

    def test_what_a_task_held_is_free_before_the_next_one_comes(self, writer):
        held, freed = Held(), threading.Event()
        held.on_free = freed.set
        writer.submit(held.touch)
        del held
        assert freed.wait(PATIENCE_S)


class Held:
    def touch(self):
        pass

    def __del__(self):
        self.on_free()


class Disk:
    """What a ledger asks for: files that an iteration's end writes, and its commit record."""

    def __init__(self, sizes=()):
        self.sizes = sizes
        self.events = []

    def close(self, iteration):
        self.events.append(("close", iteration))
        return self.sizes

    def commit(self, fields):
        self.events.append(("commit", dict(fields)))

    @property
    def commits(self):
        return [fields for event, fields in self.events if event == "commit"]


class TestLedger:
    def open(self, **options):
        disk = Disk(**options)
        return disk, IterationLedger(disk.close, disk.commit)

    def test_commits_when_ended_and_on_disk(self):
        disk, ledger = self.open()
        ledger.handed_over(3)
        ledger.handed_over(3)
        ledger.done(3, 100)
        ledger.announce_end(3)
        ledger.ended(3, {"lm loss": 2.5})
        assert disk.events == []
        ledger.done(3, None)
        commit = {"iteration": 3, "rows": 2, "files": 1, "bytes": 100, "scalars": {"lm loss": 2.5}}
        assert disk.events == [("close", 3), ("commit", commit)]
        assert vars(ledger.total) == {"rows": 2, "files": 1, "bytes": 100}
        assert ledger.committed == 1
        assert ledger.unfinished == []

    def test_files_that_the_end_writes_are_counted(self):
        disk, ledger = self.open(sizes=[1000, 2000])
        ledger.handed_over(0)
        ledger.done(0, None)
        ledger.ended(0, {})
        assert (disk.commits[0]["files"], disk.commits[0]["bytes"]) == (2, 3000)
        assert vars(ledger.total) == {"rows": 1, "files": 2, "bytes": 3000}

    def test_an_iteration_that_is_on_disk_already_commits_at_its_end(self):
        disk, ledger = self.open()
        ledger.handed_over(0)
        ledger.done(0, 7)
        ledger.ended(0, {})
        ledger.ended(1, {})
        assert [(commit["iteration"], commit["rows"]) for commit in disk.commits] == [(0, 1), (1, 0)]

    def test_iterations_are_committed_in_their_order(self):
        """A later one that is complete first waits: its rows may refer to bytes of the earlier one."""
        disk, ledger = self.open()
        for iteration in range(3):
            ledger.handed_over(iteration)
            ledger.announce_end(iteration)
            ledger.ended(iteration, {})
        ledger.done(2, 1)
        ledger.done(1, 1)
        assert disk.commits == []
        ledger.done(0, 1)
        assert [commit["iteration"] for commit in disk.commits] == [0, 1, 2]

    def test_an_iteration_without_rows_is_committed_before_the_next(self):
        """Its end waits in the writers' queue while the training thread hands over the next one's first row."""
        disk, ledger = self.open()
        ledger.announce_end(0)
        ledger.handed_over(1)
        ledger.ended(0, {})
        assert [commit["iteration"] for commit in disk.commits] == [0]
        assert ledger.unfinished == [1]

    def test_a_running_iteration_is_never_committed(self):
        disk, ledger = self.open()
        ledger.handed_over(0)
        ledger.done(0, 7)
        assert disk.events == []
        assert ledger.unfinished == [0]

    def test_what_can_not_be_closed_is_not_committed_by_the_next_row(self):
        """The other writer may still be at a row of a later iteration when the closing fails."""

        class Full(Disk):
            def close(self, iteration):
                super().close(iteration)
                if len(self.events) == 1:
                    raise CaptureError("full")
                return []

        disk = Full()
        ledger = IterationLedger(disk.close, disk.commit)
        ledger.handed_over(0)
        ledger.announce_end(0)
        ledger.handed_over(1)
        ledger.ended(0, {})
        with pytest.raises(CaptureError, match="full"):
            ledger.done(0, 7)
        ledger.done(1, 7)
        assert disk.commits == []
        assert ledger.committed == 0

    def test_a_row_before_the_end_of_the_iteration_before_is_an_error(self):
        _, ledger = self.open()
        ledger.handed_over(3)
        with pytest.raises(CaptureError, match="iteration 5 was shown before the end of iteration 3"):
            ledger.handed_over(5)
        ledger.announce_end(3)
        ledger.handed_over(5)

    def test_whoever_waits_for_the_iterations_before_goes_on_when_they_are_committed(self):
        _, ledger = self.open()
        ledger.handed_over(0)
        ledger.announce_end(0)
        ledger.handed_over(1)
        passed = threading.Event()
        threading.Thread(target=lambda: (ledger.wait_for_those_before(1), passed.set())).start()
        assert not passed.wait(0.05)
        ledger.ended(0, {})
        assert not passed.wait(0.05)
        ledger.done(0, 7)
        assert passed.wait(20)

    def test_nobody_waits_for_what_was_abandoned(self):
        _, ledger = self.open()
        ledger.handed_over(0)
        ledger.announce_end(0)
        ledger.handed_over(1)
        ledger.abandon()
        ledger.wait_for_those_before(1)

    def test_a_row_after_the_end_is_an_error(self):
        _, ledger = self.open()
        ledger.announce_end(4)
        with pytest.raises(CaptureError, match="iteration 4 was shown after the iteration's end"):
            ledger.handed_over(4)

    def test_untouched(self):
        assert self.open()[1].untouched
        for touch in (lambda ledger: ledger.handed_over(0), lambda ledger: ledger.announce_end(0)):
            ledger = self.open()[1]
            touch(ledger)
            assert not ledger.untouched
