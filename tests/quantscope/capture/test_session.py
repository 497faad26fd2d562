"""A session over its iterations: when tensors are kept, of which modules, and how runs stand beside each other."""

from dataclasses import replace

import pytest
import torch

from megatron.quantscope.capture import CaptureUsageError, ParallelCoordinates, Schedule, TensorFilter, open_capture
from megatron.quantscope.capture.state import STATE
from tests.quantscope.capture.conftest import (
    LINEAR,
    ROWS_A_PASS,
    linear_tensors,
    read,
    rows_of,
    run_iteration,
    show_backward,
    show_forward,
)


class TestWhen:
    def kept(self, session, iterations, micro_batches=1):
        for iteration in iterations:
            run_iteration(session, iteration, micro_batches=micro_batches)
            if session.finished:
                break
        capture = read(session)
        return sorted({(row.iteration, row.micro_batch) for row in capture.records})

    @pytest.mark.parametrize(
        ("control_iter", "micro_batches", "expected"),
        [
            (1, 1, [(0, 0)]),
            (3, 1, [(0, 0), (1, 0), (2, 0)]),
            (3, 2, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
            (0, 1, [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]),
        ],
    )
    def test_iterations_and_micro_batches(self, open_session, control_iter, micro_batches, expected):
        session = open_session(control_iter=control_iter, collect_micro_batches=micro_batches)
        assert self.kept(session, range(5), micro_batches=4) == expected

    def test_after_a_resume_iterations_are_absolute_and_counted_from_the_start(self, open_session):
        session = open_session(control_iter=2)
        assert self.kept(session, range(5000, 5010)) == [(5000, 0), (5001, 0)]

    def test_schedule_counts_from_the_start(self, open_session):
        session = open_session(control_iter=2, schedule=Schedule(start=1, every=2))
        assert self.kept(session, range(100, 110)) == [(101, 0), (103, 0)]

    def test_finished_when_the_schedule_can_collect_no_more(self, open_session):
        session = open_session(control_iter=9, schedule=Schedule(every=2, until=4))
        assert self.kept(session, range(10)) == [(0, 0), (2, 0)]

    def test_not_finished_before_the_iteration_is_complete(self, open_session):
        session = open_session(control_iter=1)
        assert not session.finished
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        assert not session.finished
        session.end_iteration({})
        assert session.finished

    def test_evaluation_keeps_nothing_and_moves_nothing(self, open_session):
        session = open_session()
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [4])
        with session.suspended():
            session.begin_micro_batch(0, [99])
            assert site.tap() is None
        assert site.tap() is not None
        assert STATE.current_sample_idx == 4

    def test_no_tap_outside_the_collected_micro_batches(self, open_session):
        session = open_session()
        site = session.site(**LINEAR)
        assert site.tap() is None
        session.begin_iteration(0)
        assert site.tap() is None
        session.begin_micro_batch(1, [0])
        assert site.tap() is None
        session.begin_micro_batch(0, [0])
        assert site.tap() is not None
        session.end_iteration({})
        assert site.tap() is None
        session.close()
        assert site.tap() is None

    def test_backward_rows_carry_the_coordinates_of_their_forward(self, open_session):
        """1F1B: the second micro-batch's forward runs before the first one's backward."""
        session = open_session(collect_micro_batches=2)
        site, taps = session.site(**LINEAR), []
        session.begin_iteration(3)
        for micro_batch in range(2):
            session.begin_micro_batch(micro_batch, [40 + micro_batch, 50 + micro_batch])
            taps.append(site.tap())
            show_forward(taps[-1], linear_tensors(micro_batch))
        for micro_batch in range(2):
            show_backward(taps[micro_batch], linear_tensors(micro_batch))
        session.end_iteration({})
        capture = read(session)
        for micro_batch in range(2):
            row = rows_of(capture, tensor_name="grad_output", micro_batch=micro_batch)[0]
            assert (row.sample_idx, row.sample_indices) == (40 + micro_batch, (40 + micro_batch, 50 + micro_batch))
            assert torch.equal(capture.load(row), linear_tensors(micro_batch)["grad_output"])

    def test_the_state_follows_for_direct_saves(self, open_session):
        session = open_session(rank=2, parallel=ParallelCoordinates(dp_rank=2, dp_size=4))
        session.begin_iteration(6)
        session.begin_micro_batch(1, [33, 34])
        assert (STATE.current_rank, STATE.current_iteration, STATE.current_sample_idx) == (2, 6, 33)
        assert (STATE.batch_idx, STATE.directory) == (1, session.config.directory)
        assert STATE.session is session
        session.close()
        assert STATE.run_id is STATE.directory is STATE.session is None


class TestSites:
    def test_the_filter_decides(self, open_session):
        session = open_session(filter=TensorFilter.parse(["layers=1", "tensors=grad_*", "operations=backward"]))
        assert session.site(**LINEAR) is None
        assert session.site(**(LINEAR | {"module": "output_layer", "layer_idx": None})) is None
        run_iteration(session, 0, site=session.site(**(LINEAR | {"layer_idx": 1})))
        names = [record.tensor_name for record in read(session).records]
        assert names == ["grad_output", "grad_input", "grad_weight"]

    def test_a_rank_that_is_not_kept_writes_nothing_and_still_stops(self, open_session):
        session = open_session(
            rank=1, parallel=ParallelCoordinates(dp_rank=1, dp_size=2), filter=TensorFilter.parse(["ranks=0"])
        )
        assert session.site(**LINEAR) is None
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        session.end_iteration({"lm loss": 1.0})
        assert session.finished
        session.close()
        assert not session.config.directory.exists()
        assert session.summary().files == 0

    def test_what_another_rank_keeps_is_left_out(self, open_session):
        session = open_session()
        run_iteration(session, 0, site=session.site(**LINEAR, leave_out={"input"}))
        assert not rows_of(read(session), tensor_name="input")

    @pytest.mark.parametrize("part", ["layer_type", "component"])
    def test_parts_of_names_are_checked(self, open_session, part):
        with pytest.raises(CaptureUsageError, match=part):
            open_session().site(**(LINEAR | {part: "../up"}))

    @pytest.mark.parametrize("settings", [{"quant_type": "../up"}, {"run_id": "a/b"}])
    def test_no_path_escapes_the_directory(self, open_session, settings, tmp_path):
        with pytest.raises(CaptureUsageError):
            open_session(**settings)
        assert list(tmp_path.iterdir()) == []

    def test_a_long_module_name_is_metadata_only(self, open_session):
        session, module = open_session(), "decoder." + "x" * 5000
        run_iteration(session, 0, site=session.site(**(LINEAR | {"module": module})))
        assert read(session).records[0].module == module


class TestRuns:
    def test_a_second_run_stands_beside_the_first(self, open_session):
        first = open_session()
        run_iteration(first, 0)
        before = read(first)
        contents = {record.path: record.path.read_bytes() for record in before.records}
        second = open_session()
        run_iteration(second, 0, tensors=linear_tensors(99))
        after = read(second)
        assert {record.run_id for record in after.records} == {second.identity["run_id"]}
        assert after.runs == {"mxfp8": [first.identity["run_id"], second.identity["run_id"]]}
        assert min(record.counter for record in after.records) > max(record.counter for record in before.records)
        assert all(path.read_bytes() == content for path, content in contents.items())
        old = open_capture(first.config.directory, run=first.identity["run_id"])
        assert [replace(record) for record in old.records] == before.records

    def test_ranks_share_a_run(self, open_session):
        for rank in range(2):
            session = open_session(
                rank=rank, parallel=ParallelCoordinates(tp_rank=rank, tp_size=2), run_id="20250101_000000_aaaaaa"
            )
            run_iteration(session, 0)
            session.close()
        capture = open_capture(session.config.directory)
        assert capture.problems == []
        assert [record.rank for record in capture.records] == [0] * ROWS_A_PASS + [1] * ROWS_A_PASS

    def test_a_run_that_never_began_leaves_nothing(self, open_session, tmp_path):
        open_session().close()
        assert list((tmp_path / "capture").iterdir()) == []

    def test_close_twice(self, open_session):
        session = open_session()
        run_iteration(session, 0)
        session.close()
        session.close()
        assert len(read(session).records) == ROWS_A_PASS
