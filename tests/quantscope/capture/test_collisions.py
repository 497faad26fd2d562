"""Rows that may not be: shown twice, or after their iteration's end; and two runs in one directory."""

import pytest

from megatron.quantscope.capture import CaptureError, folder, open_capture
from tests.quantscope.capture.conftest import (
    FORMATS_OF_FILES,
    LINEAR,
    ROWS_A_PASS,
    check_readable,
    linear_tensors,
    run_iteration,
    show_backward,
    show_forward,
)
from tests.quantscope.capture.faults import KINDS, await_commits, errors_in


@pytest.fixture(params=FORMATS_OF_FILES)
def save_format(request):
    return request.param


class TestRowsThatMayNotBe:
    def test_a_backward_after_the_end_of_its_iteration_is_told(self, open_session, caplog, save_format):
        session = open_session(save_format=save_format)
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        tap = site.tap()
        show_forward(tap, linear_tensors(0))
        session.end_iteration({})
        await_commits(session, 1)
        show_backward(tap, linear_tensors(0))
        session.close()
        assert session.failed == "a tensor of iteration 0 was shown after the iteration's end"
        assert len(errors_in(caplog)) == 1
        capture = open_capture(session.config.directory)
        assert len(capture.records) == 3
        check_readable(capture)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_collision_is_an_error_that_names_the_module(self, open_session, caplog, kind):
        session = open_session(**KINDS[kind])
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        for _ in range(2):
            show_forward(site.tap(), linear_tensors(0))
        session.end_iteration({})
        session.close()
        assert session.failed.startswith(
            f"forward input of {LINEAR['module']} was shown twice in micro-batch 0 of iteration 0"
        )
        assert len(errors_in(caplog)) == 1
        assert "training goes on" in errors_in(caplog)[0]

    def test_a_collision_stops_where_errors_do(self, open_session):
        session = open_session(stop_on_error=True)
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        for _ in range(2):
            show_forward(site.tap(), linear_tensors(0))
        with pytest.raises(CaptureError, match=f"of {LINEAR['module']} was shown twice"):
            session.end_iteration({})

    def test_other_micro_batches_iterations_and_modules_do_not_collide(self, open_session):
        session = open_session(control_iter=2, collect_micro_batches=2)
        sites = [session.site(**(LINEAR | {"module": name})) for name in ("linear_fc1", "linear_fc2")]
        for iteration in range(2):
            session.begin_iteration(iteration)
            for micro_batch in range(2):
                session.begin_micro_batch(micro_batch, [0])
                for site in sites:
                    show_forward(site.tap(), linear_tensors(iteration))
            session.end_iteration({})
        session.close()
        assert session.failed is None
        assert session.summary().rows == 2 * 2 * 2 * 3


class TestTwoRuns:
    def test_at_the_same_time_in_one_directory(self, open_session, save_format):
        sessions = [open_session(run_id=name, control_iter=0, save_format=save_format) for name in ("run_a", "run_b")]
        for iteration in range(3):
            for number, session in enumerate(sessions):
                run_iteration(session, iteration, tensors=linear_tensors(10 * number + iteration))
        for session in sessions:
            session.close()
        for number, session in enumerate(sessions):
            capture = open_capture(session.config.directory, run=session.identity["run_id"])
            assert len(capture.records) == 3 * ROWS_A_PASS
            assert capture.problems == []
            check_readable(capture, lambda iteration, number=number: linear_tensors(10 * number + iteration))

    def test_that_would_take_each_other_s_names(self, open_session, monkeypatch, caplog):
        """Two processes that write as one rank, in the same second: their counters do not know of each other."""
        monkeypatch.setattr("megatron.quantscope.capture.site.time.time", lambda: 1.7e9)
        first, second = (open_session(run_id=name) for name in ("run_a", "run_b"))
        second._sink._folder = folder.CaptureFolder(first._sink._folder.path, 0)
        second._sink._rows._files._folder = second._sink._folder
        assert (first._sink._folder.next_counter(), second._sink._folder.next_counter()) == (1, 1)
        run_iteration(first, 0)
        first.close()
        run_iteration(second, 0, tensors=linear_tensors(5))
        second.close()
        assert first.failed is None
        assert "exists and is not overwritten: does another run write as rank 0?" in second.failed
        assert len(errors_in(caplog)) == 1
        capture = open_capture(first.config.directory, run="run_a")
        assert len(capture.records) == ROWS_A_PASS
        check_readable(capture)
