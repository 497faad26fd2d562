import base64
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.quantscope.report.html import encode

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \" ' & \u2028 \U0001f642"


def values_of(tile):
    flat = np.frombuffer(base64.b64decode(tile["values"]), dtype="<f2").astype(float)
    return np.ldexp(flat, tile["exponent"]).reshape(tile["shape"])


def test_what_is_packed_comes_back():
    data = {"text": HOSTILE, "numbers": [1, 2.5, None], "nested": {"ünï": []}}
    assert encode.unpack(encode.pack(data)) == data


def test_the_same_data_gives_the_same_text():
    assert encode.pack({"a": [1, 2]}) == encode.pack({"a": [1, 2]})


def test_packed_text_holds_nothing_that_is_markup():
    assert set(encode.pack({"text": HOSTILE * 50})) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_without_a_number_is_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        encode.pack({"value": value})


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_columns_hold_numbers_that_are_near_or_null(values):
    column = encode.numbers(values)
    assert json.loads(json.dumps(column, allow_nan=False)) == column
    for value, written in zip(values, column, strict=True):
        if math.isfinite(value):
            assert written == pytest.approx(value, rel=0.5001 * 10.0 ** (1 - encode.DIGITS), abs=0)
        else:
            assert written is None
        assert written == encode.number(value)


def test_whole_numbers_stay_exact():
    assert encode.numbers([22656.0, 123456789.0, -0.0]) == [22656, 123456789, 0]
    assert encode.number(None) is None


def test_sqnr_has_words_for_what_is_no_number():
    assert encode.sqnr(np.array([31.25, math.inf, -math.inf, math.nan])) == [31.25, "exact", "lost", None]


@pytest.mark.parametrize("scale", [1e-38, 1e-9, 1.0, 22600.0, 3e38])
def test_tiles_keep_magnitudes_far_outside_of_float16(scale):
    values = scale * np.abs(np.random.default_rng(0).standard_normal((7, 5)))
    found = values_of(encode.tile(values))
    assert np.all(np.abs(found - values) <= np.maximum(values / 64, values.max() / 2**20))


def test_tiles_of_nothing_but_zeros_and_of_what_is_not_finite():
    assert not values_of(encode.tile(np.zeros((2, 3)))).any()
    found = values_of(encode.tile(np.array([[1.0, math.nan], [math.inf, -math.inf]])))
    np.testing.assert_array_equal(found, [[1.0, math.nan], [math.inf, -math.inf]])
