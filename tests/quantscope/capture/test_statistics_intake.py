"""Statistics that a device's kernel leaves in one buffer, which goes to the host once an iteration.

The kernel runs in Triton's interpreter here, on CPU tensors that are taken for a device's.
"""

import pytest
import torch

from megatron.quantscope.capture import statistics_intake as subject
from megatron.quantscope.formats import measure, measure_blocks
from megatron.quantscope.formats.backends import BACKENDS
from tests.quantscope.capture.conftest import ROWS_A_PASS, linear_tensors, read, run_iteration

pytestmark = pytest.mark.skipif(BACKENDS["triton"].lacks() is not None, reason="needs triton")
LARGE_BYTES = 1 << 20
ONE_ROW_BYTES = 4096  # room for the statistics of one tensor of these


@pytest.fixture
def as_on_a_device(monkeypatch):
    """All tensors are measured as a device's are; the transfers that were made."""
    transfers = []
    transfer = subject.StatisticsIntake._transfer

    def counted(intake, device):
        transfers.append(device)
        transfer(intake, device)

    monkeypatch.setattr(subject, "measures_on_device", lambda tensor: True)
    monkeypatch.setattr(subject.StatisticsIntake, "_transfer", counted)
    return transfers


def test_one_transfer_an_iteration_and_the_same_numbers(open_session, as_on_a_device):
    session = open_session(mode="statistics", control_iter=2)
    for iteration in range(2):
        run_iteration(session, iteration, tensors=linear_tensors(iteration))
    capture = read(session)
    assert len(as_on_a_device) in (2, 3)  # one an iteration, and an empty one at the end
    assert len(capture.records) == 2 * ROWS_A_PASS
    for record in capture.records:
        statistics, blocks = measure_blocks(linear_tensors(record.iteration)[record.tensor_name])
        found = record.statistics
        assert (found.count, found.zero, found.min, found.max) == (
            statistics.count,
            statistics.zero,
            statistics.min,
            statistics.max,
        )
        assert found.exponents == statistics.exponents
        assert found.mean == pytest.approx(statistics.mean, abs=1e-12)
        assert torch.equal(capture.block_exponents(record), blocks)


def test_rows_wait_until_their_measurement_is_on_its_way(as_on_a_device):
    intake = subject.StatisticsIntake(LARGE_BYTES)
    measurement = intake.measure(torch.arange(64.0))
    assert not measurement.ready
    intake.transfer()
    assert measurement.ready
    assert measurement()[0].max == 63.0


def test_a_full_buffer_is_sent_and_filled_anew(as_on_a_device):
    intake = subject.StatisticsIntake(ONE_ROW_BYTES)
    measurements = [intake.measure(torch.full((64,), float(number + 1))) for number in range(3)]
    assert [measurement.ready for measurement in measurements] == [True, True, False]
    intake.transfer()
    assert [measurement()[0].max for measurement in measurements] == [1.0, 2.0, 3.0]


def test_what_no_buffer_holds_is_measured_at_once(as_on_a_device):
    tensor = torch.randn(64 * ONE_ROW_BYTES)  # its map alone is larger
    measurement = subject.StatisticsIntake(ONE_ROW_BYTES).measure(tensor)
    assert measurement.ready
    assert measurement()[0] == measure(tensor)
