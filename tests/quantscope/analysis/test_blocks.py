import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.blocks import DEPTHS, summarize_blocks


def blocks_of(x, axis):
    """Blocks of 32 along an axis as rows of float64, short ones filled up with zeros, by plain numpy."""
    rows = np.moveaxis(x.double().numpy(), axis, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32))).reshape(-1, 32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_histograms_of_amax_and_depths(rough, dtype, axis):
    x = rough.to(dtype)
    found = summarize_blocks(x, axis, depths=True)
    blocks = np.abs(blocks_of(x, axis))
    amax = blocks.max(axis=1)
    assert (found.total, found.zero) == (len(blocks), int((amax == 0).sum()))
    exponents, counts = np.unique(np.frexp(amax[amax > 0])[1] - 1, return_counts=True)
    assert found.first == exponents[0]
    by_exponent = found.amax.sum(axis=1)
    np.testing.assert_array_equal(by_exponent[exponents - found.first], counts)
    assert by_exponent[-1] > 0
    assert by_exponent.sum() == counts.sum()
    depth = (np.frexp(amax)[1][:, None] - np.frexp(blocks)[1])[blocks > 0]
    np.testing.assert_array_equal(found.depths, np.bincount(np.minimum(depth, DEPTHS - 1), minlength=DEPTHS))
    assert summarize_blocks(x, axis, depths=False).depths is None


@pytest.mark.parametrize("x", [torch.empty(0), torch.zeros(3, 40), torch.tensor([float("nan"), 1.0])], ids=str)
def test_no_usable_block(x):
    found = summarize_blocks(x, -1, depths=True)
    assert (found.first, found.amax.shape, found.depths.sum()) == (0, (0, 4), 0)
    assert found.zero == (6 if x.dim() == 2 else 0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_blocks_of_any_size_that_are_not_all_zeros(rough, dtype, axis):
    x = rough.to(dtype)
    x[5, 8] = float("nan")
    x[:20, 48:] = 0
    found = summarize_blocks(x, axis, depths=False, sizes=(16, 24, 32))
    rows = np.moveaxis(x.double().numpy(), axis, -1)
    for size in (16, 24, 32):
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
        assert found.live[size] == int((padded.reshape(-1, size) != 0).any(axis=1).sum()), size
    assert set(summarize_blocks(x, axis, depths=False).live) == {32}


def test_shapes_without_blocks_and_views():
    assert summarize_blocks(torch.empty(3, 0), -1, depths=False, sizes=(16,)).live == {16: 0, 32: 0}
    assert summarize_blocks(torch.tensor(2.0), 0, depths=False, sizes=(16,)).live == {16: 1, 32: 1}
    x = torch.eye(48)[:, ::2]
    assert summarize_blocks(x, 0, depths=False, sizes=(16,)).live == {16: 24, 32: 24}
