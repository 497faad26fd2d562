"""The signal that asks a run to end: noted once, shared by the ranks, and final when it is given again."""

import os
import signal
from types import SimpleNamespace

import pytest

from megatron.quantscope.capture.termination import TerminationWatch
from megatron.training import exit_signal
from megatron.training.exit_signal import ExitSignal

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def heard():
    """What came through to the handler that was there before."""
    numbers = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def send(number=signal.SIGUSR1):
    os.kill(os.getpid(), number)


def test_received_after_it_came_and_not_before(heard):
    with ExitSignal("SIGUSR1") as watch:
        assert not watch.received()
        send()
        assert watch.received()
        assert watch.received(), "it is not forgotten"
    send()
    assert heard == [signal.SIGUSR1], "the handler of before is back"


def test_twice_at_once_is_one(heard):
    with ExitSignal("SIGUSR1") as watch:
        send()
        send()
        assert watch.received()
    assert not heard


def test_again_later_has_the_effect_it_had(heard, monkeypatch):
    monkeypatch.setattr(exit_signal, "SAME_SIGNAL_S", 0.0)
    with ExitSignal("SIGUSR1"):
        send()
        send()
    assert heard == [signal.SIGUSR1]


def test_without_the_flag_nothing_is_watched(heard):
    with ExitSignal.of(SimpleNamespace(exit_signal_handler=False, exit_signal="SIGUSR1")) as watch:
        send()
        assert not watch.received()
    assert heard == [signal.SIGUSR1]


def test_the_capture_leaves_sigterm_to_it():
    flushed = []
    with ExitSignal("SIGTERM") as watch:
        capture = TerminationWatch(lambda: flushed.append(True))
        capture.install()
        send(signal.SIGTERM)
        assert watch.received()
        capture.remove()
    assert not flushed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_readers_never_end_by_it(parse):
    before = signal.getsignal(signal.SIGHUP)
    exit_signal.reader_start(parse(exit_signal_handler=True, exit_signal="SIGHUP"))(0)
    try:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert exit_signal.reader_start(parse()) is None


def test_only_signals_that_can_be_handled(command):
    from megatron.training.arguments import parse_arguments
    from megatron.training.failure import UsageError

    with pytest.raises((UsageError, SystemExit)):
        parse_arguments(command(exit_signal_handler=True, exit_signal="SIGKILL"))
