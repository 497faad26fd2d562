"""An evaluation reads whole batches, also while the training batch still grows."""

from types import SimpleNamespace

import pytest

from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.training import steps

MICRO_BATCH, RAMP, GLOBAL_BATCH = 2, [4, 4, 16], 12


@pytest.fixture
def schedule(monkeypatch):
    """What megatron-core's schedule is called with."""
    calls = []

    def record(**settings):
        calls.append(settings)
        return []

    monkeypatch.setattr(steps, "get_forward_backward_func", lambda: record)
    init_num_microbatches_calculator(0, RAMP, GLOBAL_BATCH, MICRO_BATCH, 1)
    yield calls
    destroy_num_microbatches_calculator()


@pytest.mark.usefixtures("one_rank")
def test_micro_batches_of_an_evaluation_during_ramp_up(schedule):
    args = SimpleNamespace(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, data_parallel_size=1, seq_length=8
    )
    for forward_only in (False, True):
        steps.run_micro_batches(args, [None], iter([]), steps.ForwardStep(), forward_only=forward_only)
    assert [call["num_microbatches"] for call in schedule] == [RAMP[0] // MICRO_BATCH, GLOBAL_BATCH // MICRO_BATCH]
