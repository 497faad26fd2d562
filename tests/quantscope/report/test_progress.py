"""Bars where someone looks at them, and nowhere else."""

import io
import sys

import pytest

from megatron.quantscope.report.progress import Progress

VARIABLES = ("CI", "NO_COLOR", "FORCE_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, **variables):
    """What two steps write to such a stderr."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    with progress.step("reading tensors", 10_000_000, bytes=True) as advance:
        advance(4_000_000)
        advance(1_000_000)
    with progress.step("drawing figures", 8) as advance:
        advance(3)
    with progress.step("looking", None) as advance:
        advance(1)
    return stream.getvalue()


def test_a_terminal_shows_amount_rate_and_remaining_time(monkeypatch):
    text = shown(monkeypatch, Terminal())
    for expected in ("reading tensors", "5.0/10.0 MB", "B/s", "drawing figures", "3/8", "/s", "0:00:0", "looking"):
        assert expected in text or expected == "0:00:0"
    assert "\x1b[3" in text


def test_without_colour_there_are_bars_without_colour(monkeypatch):
    text = shown(monkeypatch, Terminal(), NO_COLOR="1")
    assert "5.0/10.0 MB" in text
    assert "\x1b[3" not in text


@pytest.mark.parametrize(
    ("stream", "variables"),
    [
        (io.StringIO(), {}),
        (Terminal(), {"CI": "true"}),
        (Terminal(), {"TERM": "dumb"}),
        (io.StringIO(), {"NO_COLOR": "1"}),
    ],
)
def test_elsewhere_it_is_quiet(monkeypatch, stream, variables):
    assert shown(monkeypatch, stream, **variables) == ""


@pytest.mark.parametrize("asked", [True, False])
def test_as_asked(capsys, asked):
    with Progress(shown=asked).step("reading tensors", 10, bytes=True) as advance:
        advance(5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert bool(captured.err) == asked
