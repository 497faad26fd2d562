"""A listener is told every row, in every mode the same; what it does wrong costs it its place, and nothing else."""

import threading

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.formats import measure
from tests.quantscope.capture.conftest import (
    LINEAR,
    MODES,
    ROWS_A_PASS,
    linear_tensors,
    show_backward,
    show_forward,
)

ITERATIONS, MICRO_BATCHES = 2, 2


class Listener:
    """Remembers what it is told, and on which threads."""

    def __init__(self):
        self.rows, self.ends, self.threads = [], [], set()

    def observe(self, tensor, shown):
        pytest.fail("asked on the training thread about a CPU tensor")

    def row(self, metadata, statistics, tensor, observed):
        self.threads.add(threading.get_ident())
        assert observed is None
        self.rows.append((metadata, statistics, tensor.clone()))

    def iteration(self, iteration):
        told = {metadata.iteration for metadata, _, _ in self.rows}
        assert iteration in told
        self.ends.append(iteration)


class Faulty(Listener):
    def __str__(self):
        return "a faulty listener"

    def row(self, metadata, statistics, tensor, observed):
        super().row(metadata, statistics, tensor, observed)
        raise OSError("no room")


def shown_by_pass():
    return [linear_tensors(seed) for seed in range(ITERATIONS * MICRO_BATCHES)]


def collect(session, listener):
    session.listen(listener)
    site = session.site(**LINEAR)
    passes = iter(shown_by_pass())
    for iteration in range(ITERATIONS):
        session.begin_iteration(iteration)
        for micro_batch in range(MICRO_BATCHES):
            session.begin_micro_batch(micro_batch, [micro_batch])
            tap, tensors = site.tap(), next(passes)
            show_forward(tap, tensors)
            show_backward(tap, tensors)
            for tensor in tensors.values():
                tensor.zero_()  # what a listener is told of is a copy
        session.end_iteration({})
    session.close()
    return open_capture(session.config.directory)


@pytest.mark.parametrize("save_format", ["pt", "segment"])
@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_told_once(open_session, mode, save_format):
    listener = Listener()
    session = open_session(
        control_iter=ITERATIONS, collect_micro_batches=MICRO_BATCHES, mode=mode, save_format=save_format
    )
    capture = collect(session, listener)
    assert not capture.problems
    assert len(listener.rows) == len(capture.records) == ITERATIONS * MICRO_BATCHES * ROWS_A_PASS
    assert listener.ends == list(range(ITERATIONS))
    assert threading.get_ident() not in listener.threads
    passes = shown_by_pass()
    for metadata, statistics, tensor in listener.rows:
        shown = passes[metadata.iteration * MICRO_BATCHES + metadata.micro_batch][metadata.tensor_name]
        assert torch.equal(tensor, shown)
        assert statistics == measure(shown).to_json()


def test_statistics_are_those_of_a_capture_without_listener(open_session, tmp_path):
    told = collect(open_session(control_iter=2, collect_micro_batches=2, mode="statistics"), Listener())
    plain = open_session(control_iter=2, collect_micro_batches=2, mode="statistics", directory=tmp_path / "plain")
    plain.listen = lambda _: None
    alone = collect(plain, None)
    assert [content(record) for record in told.records] == [content(record) for record in alone.records]
    assert not any(record.path for record in told.records)


def content(record):
    place = record.iteration, record.micro_batch, record.tensor_name
    return *place, record.statistics.to_json(), record.blocks["counts"]


def test_a_listener_that_fails_is_told_nothing_more(open_session, caplog):
    listener = Faulty()
    session = open_session(control_iter=ITERATIONS, collect_micro_batches=MICRO_BATCHES)
    capture = collect(session, listener)
    assert 1 <= len(listener.rows) <= 2  # two threads write
    assert not session.failed
    assert len(capture.records) == ITERATIONS * MICRO_BATCHES * ROWS_A_PASS
    assert [record.message for record in caplog.records] == [
        "a faulty listener is told of no more tensors: OSError: no room"
    ]
