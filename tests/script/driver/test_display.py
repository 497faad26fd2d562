import pytest

from script.driver import display
from script.driver.display import Display, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (731_381_760, "731 MB"), (3.66e9, "3.66 GB"), (5e15, "5e+03 TB")],
)
def test_sizes(count, text):
    assert size(count) == text


def test_outside_a_terminal_the_state_is_told_now_and_then(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    shown = Display()
    with shown.following("mxfp8: starting"):
        for second in range(25):
            now[0] = 100.0 + second
            shown.follow(f"{second} s [of] it")  # brackets are text, not markup
    assert capsys.readouterr().out == "10 s [of] it\n20 s [of] it\n"


def test_long_lines_are_not_broken(capsys):
    Display().say("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"
