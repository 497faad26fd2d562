"""The converters of flag values: what they take, what they return, and what they say of the rest."""

import argparse

import pytest

from megatron.training.flags.values import finite_float, fraction, layer_pattern, non_negative_float, split_weights


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("99,1,0", "99,1,0"),
        ("'99,1,0'", "99,1,0"),
        ('"969, 30, 1"', "969,30,1"),
        ("100", "100"),
        ("1,1", "1,1"),
        ("0.9,0.05,0.05", "0.9,0.05,0.05"),
        ("8.,1.,1.", "8,1,1"),
    ],
)
def test_split_weights(text, value):
    assert split_weights(text) == value


@pytest.mark.parametrize(
    "text", ["", "a,b", "0,0,0", "0,1,1", "1,2,3,4", "1,,2", "-1,2,3", "nan,1,1", "inf,1,1", "1;2"]
)
def test_split_weights_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="such as 99,1,0") as caught:
        split_weights(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("convert", "good", "bad", "allowed"),
    [
        (finite_float, ["0", "-1.5", "1e-3"], ["nan", "inf", "x", ""], "a number"),
        (non_negative_float, ["0", "1.5"], ["-0.1", "nan", "-inf", "x"], "a number >= 0"),
        (fraction, ["0", "1", "0.1"], ["-0.1", "1.01", "nan", "x"], "a number from 0 to 1"),
    ],
)
def test_numbers(convert, good, bad, allowed):
    assert [convert(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            convert(text)
        assert str(caught.value) == f"{text!r} is not allowed: give {allowed}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("12", 12),
        ("[1,0]", [1, 0]),
        ("([1]*3+[0]*1)*2", [1, 1, 1, 0] * 2),
        ("([0]+[1]*3)", [0, 1, 1, 1]),
        (" [0] + [1,1] ", [0, 1, 1]),
    ],
)
def test_layer_pattern(text, value):
    assert layer_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "x", "[]", "[2]", "[1]*0", "[1]*-1", "[1", "[x]", "[1]*10**9", "[1]-[0]", "[1].copy()", "1.5"],
)
def test_layer_pattern_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a list of zeros and ones such as") as caught:
        layer_pattern(text)
    assert repr(text) in str(caught.value)
