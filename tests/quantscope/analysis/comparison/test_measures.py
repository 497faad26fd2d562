"""The measures of a pair against NumPy float64 over the whole tensors, on what is hard to measure."""

import math

import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.comparison import measures
from megatron.quantscope.analysis.comparison.measures import equal_measures, measure_pair

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def by_numpy(x, reference):
    """(sqnr_db, cosine, relative_l2, max_error) as the table of the module's docstring has them, in one go."""
    x, reference = (np.asarray(one.detach().double().numpy()).ravel() for one in (x, reference))
    agree = (x == reference) | (np.isnan(x) & np.isnan(reference))
    finite = np.isfinite(x) & np.isfinite(reference)
    if (~finite & ~agree).any():
        return -INF, NAN, INF, INF
    x, reference = x[finite], reference[finite]
    error = np.linalg.norm(x - reference)
    signal, length = np.linalg.norm(reference), np.linalg.norm(x)
    if error == 0:
        return INF, 1.0, 0.0, 0.0
    sqnr = 20 * np.log10(signal / error) if signal else -INF
    cosine = float(np.dot(x / length, reference / signal)) if signal and length else NAN
    return sqnr, cosine, error / signal if signal else INF, np.abs(x - reference).max()


def check(x, reference):
    found = measure_pair(x, reference)
    expected = by_numpy(x, reference)
    values = (found.sqnr_db, found.cosine, found.relative_l2, found.max_error)
    assert values == pytest.approx(expected, rel=1e-10, abs=1e-12, nan_ok=True)
    assert found.count == x.numel()
    return found


def noisy(count=1000, seed=0, dtype=torch.float32, noise=0.05):
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(count, generator=generator, dtype=torch.float64)
    x = reference + noise * torch.randn(count, generator=generator, dtype=torch.float64)
    return x.to(dtype), reference.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise(dtype):
    x, reference = noisy(dtype=dtype)
    found = check(x, reference)
    assert not found.equal
    assert 24 < found.sqnr_db < 28


@pytest.mark.parametrize("count", [1, 7, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 300_001])
def test_chunks_of_any_length(count):
    check(*noisy(count))


def test_a_difference_in_the_last_element_of_the_last_chunk():
    reference = torch.zeros(300_001)
    x = reference.clone()
    x[-1] = 3.0
    found = check(x, reference)
    assert (found.equal, found.max_error, found.sqnr_db) == (False, 3.0, -INF)


@pytest.mark.parametrize(
    "values",
    [[1.0, 2.0], [0.0, -0.0], [NAN, 1.0, INF, -INF], [0.0], [5e-324], []],
    ids=str,
)
def test_the_same_bits_are_equal_whatever_they_hold(values):
    x = torch.tensor(values, dtype=torch.float64)
    assert measure_pair(x, x.clone()) == equal_measures(len(values))
    assert measure_pair(x, x.clone()).equal


def test_zeros_of_both_signs_have_the_same_value_and_other_bits():
    found = check(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.equal, found.sqnr_db, found.cosine) == (False, INF, 1.0)


def test_one_side_zero():
    zero, x = torch.zeros(5), torch.arange(5.0)
    of_zero = check(x, zero)
    assert (of_zero.sqnr_db, of_zero.relative_l2, of_zero.max_error) == (-INF, INF, 4.0)
    assert math.isnan(of_zero.cosine)
    became_zero = check(zero, x)
    assert (became_zero.sqnr_db, became_zero.relative_l2) == (0.0, 1.0)
    assert math.isnan(became_zero.cosine)


NOT_FINITE = {
    "nan in both": ([NAN, 1.0, 2.0], [NAN, 1.0, 3.0], True),
    "nan in one": ([NAN, 1.0, 2.0], [0.0, 1.0, 2.0], False),
    "nan in the baseline": ([0.0, 1.0, 2.0], [NAN, 1.0, 2.0], False),
    "the same infinity": ([INF, -INF, 2.0], [INF, -INF, 3.0], True),
    "the other infinity": ([INF, 1.0], [-INF, 1.0], False),
    "infinity and nan": ([INF, 1.0], [NAN, 1.0], False),
    "overflow": ([INF, 1.0], [65504.0, 1.0], False),
    "nothing finite, all agree": ([NAN, INF, 0.0], [NAN, INF, -0.0], True),
}


@pytest.mark.parametrize("case", NOT_FINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite(case, dtype):
    x, reference, agrees = NOT_FINITE[case]
    found = check(torch.tensor(x, dtype=dtype), torch.tensor(reference, dtype=dtype))
    assert not found.equal
    assert (found.sqnr_db > -INF) == agrees
    assert math.isfinite(found.relative_l2) == agrees


def test_a_nan_of_another_payload_agrees_and_is_not_equal():
    x = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    found = check(x, other)
    assert (found.equal, found.sqnr_db) == (False, INF)


def test_not_finite_in_a_later_chunk_and_agreeing():
    x, reference = noisy(300_000)
    x[200_000] = reference[200_000] = NAN
    check(x, reference)


@pytest.mark.parametrize("factor", [1e-300, 1e-160, 1e160, 1e300])
def test_squares_beyond_the_range_of_float64(factor):
    x, reference = noisy(dtype=torch.float64)
    found, plain = measure_pair(x * factor, reference * factor), measure_pair(x, reference)
    assert found.sqnr_db == pytest.approx(plain.sqnr_db, rel=1e-12)
    assert found.cosine == pytest.approx(plain.cosine, rel=1e-12)
    assert found.max_error == pytest.approx(plain.max_error * factor, rel=1e-12)


def test_extremes_of_float32():
    smallest, largest = torch.tensor([1e-45]), torch.tensor([3.4e38])
    check(torch.cat([smallest, largest]), torch.cat([2 * smallest, largest]))
    check(largest, -largest)


def test_dtypes_may_differ():
    x, reference = noisy()
    found = check(x.bfloat16(), reference)
    assert not found.equal
    same_values = check(reference.bfloat16(), reference.bfloat16().float())
    assert (same_values.equal, same_values.sqnr_db) == (False, INF)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_other_dtypes(dtype):
    x, reference = torch.arange(40).fmod(7).to(dtype), torch.arange(40).fmod(5).to(dtype)
    check(x, reference)
    assert measure_pair(x, x.clone()).equal


def test_complex_numbers_are_two_real_ones():
    x, reference = (torch.view_as_complex(one.reshape(-1, 2)) for one in noisy())
    found, expected = measure_pair(x, reference), measure_pair(*noisy())
    assert found == expected


@pytest.mark.parametrize("chunk", [16, 1 << 17])
def test_tensors_that_are_not_contiguous(monkeypatch, chunk):
    monkeypatch.setattr(measures, "_CHUNK", chunk)
    x, reference = (one[:990].reshape(9, 11, 10) for one in noisy())
    expected = by_numpy(x, reference)
    views = {
        "transposed": (x.permute(2, 0, 1), reference.permute(2, 0, 1)),
        "one of them": (x.transpose(0, 1).contiguous().transpose(0, 1), reference),
        "strided": tuple(torch.stack([one, one + 1], dim=-1)[..., 0] for one in (x, reference)),
    }
    for name, pair in views.items():
        found = measure_pair(*pair)
        assert (found.sqnr_db, found.cosine) == pytest.approx(expected[:2], rel=1e-10), name
    assert measure_pair(x.permute(2, 0, 1), x.permute(2, 0, 1).contiguous()).equal
    one = torch.ones(1).expand(50, 50)
    assert measure_pair(one, torch.ones(50, 50)).equal


def test_no_dimension_at_all():
    check(torch.tensor(2.0), torch.tensor(3.0))
    assert measure_pair(torch.tensor(2.0), torch.tensor(2.0)).equal


def test_scales_are_divided_off():
    x, reference = noisy(dtype=torch.float64)
    found = measure_pair(8 * x, 2 * reference, scale=8.0, reference_scale=2.0)
    assert found == measure_pair(x, reference)
    same = measure_pair(6 * reference, 3 * reference, scale=6.0, reference_scale=3.0)
    assert same.sqnr_db > 300
    assert not measure_pair(reference, reference.clone(), scale=2.0).equal
    assert measure_pair(reference, reference.clone(), scale=2.0).sqnr_db == pytest.approx(20 * math.log10(2))
    assert measure_pair(reference, reference.clone(), scale=2.0, reference_scale=2.0).equal


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"shapes differ: \(3,\), and \(3, 1\) of the baseline"):
        measure_pair(torch.ones(3), torch.ones(3, 1))


def test_the_tensors_are_left_as_they_are():
    x, reference = noisy(dtype=torch.float64)
    x[3] = reference[3] = NAN
    before = x.clone(), reference.clone()
    measure_pair(x, reference)
    assert torch.equal(x.view(torch.int64), before[0].view(torch.int64))
    assert torch.equal(reference.view(torch.int64), before[1].view(torch.int64))
