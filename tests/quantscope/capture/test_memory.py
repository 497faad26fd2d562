"""A disk that is slower than the training: memory stays within the bound, and the training waits."""

import shutil

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture import sink as sink_module
from tests.quantscope.capture.conftest import linear_tensors, read, run_iteration

BOUND = 64_000_000
SLACK = 24_000_000  # the interpreter's own: statistics, lines, and a tensor that is being shown
DISK = {"bytes_a_second": 200_000_000, "shown_bytes": 10 * BOUND}  # by each writer


@pytest.mark.parametrize("options", [{"save_format": "pt"}, {"save_format": "segment"}], ids=["pt", "segment"])
def test_the_process_stays_within_the_bound_while_ten_times_as_much_is_captured(children, tmp_path, options):
    children.start("throttled", tmp_path, host_memory_bytes=BOUND, **DISK, **options)
    status, said = children.end()
    assert status == 0
    told = said[-1]
    assert told["failed"] is None
    assert told["shown"] >= 10 * BOUND
    assert told["waited"] > 0.2
    assert BOUND / 2 < told["grown"] <= BOUND + SLACK
    capture = open_capture(tmp_path)
    assert capture.problems == []
    assert torch.equal(capture.load(capture.records[-1]).unique(), torch.tensor([len(capture.records) - 1.0]))
    shutil.rmtree(tmp_path)  # more than a gigabyte of both


@pytest.mark.parametrize("mode", ["tensors", "both"])
@pytest.mark.parametrize("save_format", ["pt", "segment"])
def test_no_more_is_out_than_the_bound(open_session, save_format, mode):
    tensors = linear_tensors(tokens=64, inputs=64, outputs=64)
    bound = 2 * sum(tensor.nbytes for tensor in tensors.values())
    session = open_session(control_iter=0, host_memory_bytes=bound, save_format=save_format, mode=mode)
    for iteration in range(20):
        run_iteration(session, iteration, tensors=linear_tensors(iteration, tokens=64, inputs=64, outputs=64))
    read(session)
    assert 0 < session._sink._arena.peak_bytes <= bound
    assert session._sink._arena._out == 0


def test_statistics_that_wait_for_a_device_do_not_wait_for_ever(open_session, monkeypatch):
    """On a GPU what was measured can be read after a transfer, which comes with the iteration's end or sooner."""
    rows = 8

    class Measurement:
        ready = False

        def __init__(self, found):
            self.found = found

        def __call__(self):
            assert self.ready
            return self.found

    class Intake:
        def __init__(self):
            self.waiting, self.transfers = [], 0

        def measure(self, tensor):
            self.waiting.append(Measurement((None, None)))
            return self.waiting[-1]

        def transfer(self):
            self.transfers += 1
            for measurement in self.waiting:
                measurement.ready = True
            self.waiting.clear()

    session = open_session(mode="statistics", control_iter=0, host_memory_bytes=rows * sink_module._MEASURED_BYTES)
    intake = session._sink._statistics = Intake()
    for iteration in range(2):
        run_iteration(session, iteration, micro_batches=1)
    session.begin_iteration(2)
    session.begin_micro_batch(0, [0])
    site = session.site(module="fc", layer_type="linear", component="linear", layer_idx=0, formats={})
    for number in range(5 * rows):
        site.tap()("forward", "pre", f"t{number}", torch.ones(3))
    session.end_iteration({})
    capture = read(session)
    assert len(capture.records) == 2 * 7 + 5 * rows
    assert [record.counter for record in capture.records] == list(range(1, len(capture.records) + 1))
    assert intake.transfers > 3
