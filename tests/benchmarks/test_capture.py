"""The benchmark of capture runs, and its table tells what was measured from what was wanted."""

import subprocess
import sys

import pytest

from tests.benchmarks.capture import MODES, Line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (Line(what="some", ratios=[1.0, 2.0, 3.0], at_most=2.0), "2.00     1.50 .. 2.50   <= 2    met"),
        (Line(what="some", ratios=[1.0, 2.0, 3.0], at_most=1.9), "2.00     1.50 .. 2.50   <= 1.9  missed"),
        (Line(what="some", ratios=[0.5], at_least=0.6), "0.50     0.50 .. 0.50   >= 0.6  missed"),
        (Line(what="some", ratios=[0.5]), "0.50     0.50 .. 0.50"),
    ],
)
def test_a_line_says_whether_its_goal_is_met(line, expected):
    assert str(line).removeprefix("some").strip() == expected


@pytest.mark.slow
def test_the_table_has_every_mode_and_capture_changes_nothing():
    words = [sys.executable, "-m", "tests.benchmarks.capture", "--tiny", "--pairs", "1"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    for mode in MODES:
        assert f"{mode}: CPU, until on disk" in ran.stdout
        assert f"{mode}: blocked, by a memcpy" in ran.stdout
    assert ran.stdout.count("; 0 losses differ") == len(MODES)


@pytest.mark.slow
def test_a_profile_names_functions_of_both_sides():
    words = [sys.executable, "-m", "tests.benchmarks.capture", "--tiny", "--profile", "pt"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    training, others = ran.stdout.split("other threads:")
    assert "(capture/site.py:" in training
    assert "write_record" in others
