"""`--tensor-budget-gb`: no byte more, and what was written within it is readable."""

import json
import time

import pytest
import torch

from megatron.quantscope.capture import ParallelCoordinates, open_capture, pt_store
from tests.quantscope.capture.conftest import (
    FORMATS_OF_FILES,
    LINEAR,
    ROWS_A_PASS,
    check_readable,
    linear_tensors,
    run_iteration,
    unfinished_files,
)
from tests.quantscope.capture.faults import KINDS, await_commits, errors_in, written


@pytest.fixture(params=FORMATS_OF_FILES)
def save_format(request):
    return request.param


class TestBudget:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_ends_collecting(self, open_session, caplog, kind):
        budget = 200_000
        session = open_session(control_iter=0, budget_bytes=budget, **KINDS[kind])
        for iteration in range(100):
            run_iteration(session, iteration)
            if iteration == 1:
                await_commits(session, 2)  # the rest may wait in the queue when it is spent
        session.close()
        assert session.failed == "the budget of 0.0002 GB a rank is spent; raise --tensor-budget-gb"
        assert len(errors_in(caplog)) == 1
        assert budget / 10 < written(session) <= budget
        assert kind == "pt with blocks" or session.summary().bytes == written(session)
        capture = open_capture(session.config.directory)
        assert len(capture.records) >= 2 * ROWS_A_PASS
        check_readable(capture)
        assert unfinished_files(session) == []

    def test_nearly_all_of_it_is_used(self, open_session):
        session = open_session(control_iter=0, budget_bytes=200_000)
        for iteration in range(100):
            run_iteration(session, iteration)
            time.sleep(0.002)
        session.close()
        assert 170_000 < written(session) <= 200_000

    def test_a_tensor_larger_than_what_is_left_is_not_begun(self, open_session, save_format):
        session = open_session(budget_bytes=60_000, save_format=save_format)
        run_iteration(session, 0, tensors=dict.fromkeys(linear_tensors(), torch.zeros(100_000)))
        session.close()
        assert "budget" in session.failed
        assert written(session) == 0
        assert unfinished_files(session) == []

    def test_a_large_tensor_in_a_segment_leaves_no_hole(self, open_session):
        session = open_session(budget_bytes=60_000, save_format="segment")
        tensors = linear_tensors() | {"grad_output": torch.zeros(100_000)}
        run_iteration(session, 0, tensors=tensors)
        session.close()
        assert "budget" in session.failed
        assert 0 < written(session) <= 60_000

    def test_it_is_shared_by_the_ranks(self, open_session, save_format):
        parallel = ParallelCoordinates(dp_size=4)
        session = open_session(parallel=parallel, control_iter=0, budget_bytes=240_000, save_format=save_format)
        site = session.site(**LINEAR)  # the header of a segment has room for every site
        for iteration in range(50):
            run_iteration(session, iteration, site=site)
        session.close()
        assert 0 < written(session) <= 60_000

    def test_an_estimate_never_falls_short_of_the_file(self, open_session):
        """The budget trusts it: long metadata, an empty tensor."""
        session = open_session()
        formats = {f"gemm{number}": {"operand": "x" * 40} for number in range(200)}
        site = session.site(**(LINEAR | {"formats": formats}))
        session.begin_iteration(0)
        session.begin_micro_batch(0, range(5000), document_ids=[[number] for number in range(5000)])
        site.tap()("forward", "pre", "input", torch.zeros(0))
        session.end_iteration({})
        session.close()
        record = open_capture(session.config.directory).records[0]
        metadata = torch.load(record.path, weights_only=True)["metadata"]
        estimate = pt_store._FILE_OVERHEAD + pt_store._PICKLE_TO_JSON * len(json.dumps(metadata))
        assert record.bytes <= estimate
