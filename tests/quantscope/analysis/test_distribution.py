import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.distribution import (
    NORMAL_SCORES,
    QUANTILE_LEVELS,
    box_statistics,
    distribution_of,
    score_quantiles,
    spread_stride,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channel", [0, 507])
def test_one_channel_of_a_large_tensor_is_seen_as_often_as_it_is_there(dtype, channel):
    """Of [4096, 1024] a sample with a step of 4 would see channel 0 four times as often, and channel 507 never."""
    x = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, channel] *= 1000
    found, plain = distribution_of(x), x.double().numpy().ravel()
    assert found.kurtosis == pytest.approx(np.mean(plain**4) / np.mean(plain**2) ** 2, rel=1e-12)
    np.testing.assert_array_equal(found.top, np.sort(np.abs(plain))[::-1][:3])
    assert found.median_magnitude == pytest.approx(np.quantile(np.abs(plain), 0.5), rel=0.01)
    levels = np.array(QUANTILE_LEVELS)
    known = (levels > 1e-4) & (levels < 1 - 1e-4)
    np.testing.assert_allclose(
        np.array(found.quantiles)[known], np.quantile(plain, levels[known]), rtol=0.15, atol=0.01
    )


def test_every_second_channel_is_half_of_the_sample():
    x = torch.ones(1 << 11, 1 << 12)
    x[:, ::2] = 1000.0
    x[0, :3] = float("inf")
    found = distribution_of(x)
    assert (found.median_magnitude, found.top) == (1.0, (1000.0, 1000.0, 1000.0))
    levels = np.array(QUANTILE_LEVELS)
    np.testing.assert_array_equal(found.quantiles, np.where(levels <= 0.5, 1.0, 1000.0))


@pytest.mark.parametrize("shape", [(4096, 4096), (30030, 97), (2**3 * 3**2 * 5 * 7, 11 * 13 * 17), (3,), (0,)])
def test_the_step_of_a_sample_divides_no_dimension(shape):
    count = int(np.prod(shape))
    for most in (1 << 10, 1 << 16, 1 << 30):
        step = spread_stride(count, most)
        assert all(np.gcd(step, size) == 1 for size in shape)
        assert min(count, most) * 0.7 <= len(range(0, count, step)) <= max(2 * most, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_tensor_stays_as_it_is(rough, dtype):
    x = rough.to(dtype)
    distribution_of(x)
    assert torch.equal(x, rough.to(dtype))


def test_no_power_overflows():
    x = torch.tensor([1e300, -1e300, 1e-300, 0.0], dtype=torch.float64)
    assert distribution_of(x).kurtosis == pytest.approx(2.0)
    assert distribution_of(1e-310 * torch.ones(5, dtype=torch.float64)).kurtosis == pytest.approx(1.0)


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
