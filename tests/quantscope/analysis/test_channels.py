import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.channels import (
    channel_amax,
    max_pooled,
    peak_of,
    pooled_channels,
    tokens_by_channels,
)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((7,), (1, 7)), ((5, 7), (5, 7)), ((4, 2, 7), (8, 7)), ((4, 2, 3, 5), (8, 15))],
)
def test_tokens_and_channels(shape, expected):
    assert tokens_by_channels(torch.zeros(shape)).shape == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_channel_amax_equals_numpy(rough, dtype):
    x = rough.clamp(-60000, 60000).to(dtype).reshape(12, 2, 80)
    expected = np.abs(x.double().numpy()).reshape(24, 80).max(axis=0)
    np.testing.assert_array_equal(channel_amax(x), expected)


def test_channels_with_nan_and_inf_say_so():
    x = torch.tensor([[1.0, float("nan"), -float("inf")], [2.0, 5.0, 7.0]], dtype=torch.bfloat16)
    found = channel_amax(x)
    assert found[0] == 2.0
    assert np.isnan(found[1])
    assert found[2] == np.inf
    assert channel_amax(torch.empty(0, 4)).size == 0


def test_pooling_keeps_the_largest():
    x = torch.zeros(1000, 1, 333)
    x[137, 0, 211] = -9.0
    x[1, 0, 1] = float("inf")
    pooled = max_pooled(x, 96, 144)
    assert pooled.shape == (96, 144)
    assert pooled.max() == 9.0
    assert pooled[137 * 96 // 1000, 211 * 144 // 333] == 9.0
    assert max_pooled(torch.ones(3, 5), 96, 144).shape == (3, 5)


@pytest.mark.parametrize("shape", [(97, 2, 145), (96, 144), (500, 3), (1, 4000), (7,), ()])
def test_tiles_are_those_of_adaptive_pooling(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix = tokens_by_channels(x).abs()
    size = (min(96, matrix.shape[0]), min(144, matrix.shape[1]))
    expected = torch.nn.functional.adaptive_max_pool2d(matrix[None], size)[0]
    np.testing.assert_array_equal(max_pooled(x, 96, 144), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int64], ids=str)
def test_the_peak_is_the_first_of_the_largest(dtype):
    x = torch.zeros(1100, 1, 300)  # more than is looked at together
    x[70, 0, 9], x[1050, 0, 211], x[1051, 0, 3] = 8.0, -9.0, 9.0
    assert peak_of(x.to(dtype)) == (1050, 211)
    if dtype.is_floating_point:
        x[3, 0, 5] = float("nan")
        assert peak_of(x.to(dtype)) == (1050, 211)


def test_pooled_channels():
    found = pooled_channels(np.array([1.0, 5.0, np.nan, 2.0], dtype=np.float32), 2)
    assert found.tolist() == [5.0, 2.0]
