import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.distribution import (
    NORMAL_SCORES,
    QUANTILE_LEVELS,
    box_statistics,
    distribution_of,
    score_quantiles,
    weighted_quantiles,
)


def test_quantiles_median_top_and_kurtosis_equal_numpy(rough):
    x = rough[rough.abs() < 1e30].bfloat16()
    found, plain = distribution_of(x), x.double().numpy().ravel()
    expected = np.quantile(plain, QUANTILE_LEVELS, method="inverted_cdf")
    np.testing.assert_array_equal(found.quantiles, expected)
    assert found.median_magnitude == np.quantile(np.abs(plain), 0.5, method="inverted_cdf")
    np.testing.assert_array_equal(found.top, np.sort(np.abs(plain))[::-1][:3])
    assert found.kurtosis == pytest.approx(np.mean(plain**4) / np.mean(plain**2) ** 2, rel=1e-12)


def test_wide_dtypes_give_the_same(rough):
    x = rough.bfloat16()
    wide, found = distribution_of(x.float()), distribution_of(x)
    assert wide.top == found.top
    assert wide.quantiles == found.quantiles
    assert wide.kurtosis == pytest.approx(found.kurtosis, rel=1e-12)


def test_a_gaussian_has_kurtosis_three_and_lies_on_the_diagonal():
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    found = distribution_of(x)
    assert found.kurtosis == pytest.approx(3.0, abs=0.05)
    middle = slice(6, -6)
    np.testing.assert_allclose(score_quantiles(found.quantiles)[middle], NORMAL_SCORES[middle], atol=0.03)
    box = box_statistics(found.quantiles)
    assert box["upper"] - box["lower"] == pytest.approx(1.349, abs=0.02)
    assert box["low"] == pytest.approx(-3.0, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_odd_tensors(dtype):
    nothing = torch.tensor([float("nan"), float("inf")], dtype=dtype)
    zero = torch.zeros(2, dtype=dtype)
    for x in (nothing, zero):
        found = distribution_of(x)
        assert found.kurtosis is None
        assert found.top == (() if x is nothing else (0.0, 0.0))
    one = torch.tensor([-2.0, float("nan")], dtype=dtype)
    assert distribution_of(one).top == (2.0,)


def test_repeated_extremes_count_as_often_as_they_are_there():
    assert distribution_of(torch.tensor([5.0, -5.0, 5.0, 1.0, -5.0], dtype=torch.bfloat16)).top == (5.0, 5.0, 5.0)
    assert distribution_of(torch.tensor([5.0, -4.0, 1.0, 4.0], dtype=torch.bfloat16)).top == (5.0, 4.0, 4.0)


def test_weighted_quantiles_count_weights():
    values, counts = np.array([1.0, 2.0, 3.0]), np.array([1, 98, 1])
    np.testing.assert_array_equal(weighted_quantiles(values, counts, (0.005, 0.5, 0.995)), [1.0, 2.0, 3.0])
