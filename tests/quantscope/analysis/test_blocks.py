"""Counting (E, depth, fraction) gives what quantising every element gives, exactly."""

import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.blocks import DEPTHS, summarize_blocks
from megatron.quantscope.formats import FORMATS, fake_quantize
from tests.quantscope.analysis.conftest import numpy_error

MX = [fmt for fmt in FORMATS.values() if fmt.scale == "e8m0"]


def blocks_of(x, axis):
    """Blocks of 32 along an axis as rows of float64, short ones filled up with zeros, by plain numpy."""
    rows = np.moveaxis(x.double().numpy(), axis, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return padded.reshape(-1, 32)


def saturated(x, axis, fmt):
    blocks = np.abs(blocks_of(x, axis))
    amax = blocks.max(axis=1, keepdims=True)
    usable = np.isfinite(amax[:, 0]) & (amax[:, 0] > 0)
    scale = np.exp2(np.clip(np.floor(np.log2(amax[usable])) - fmt.emax, -127, 127))
    return int(np.count_nonzero(blocks[usable] > fmt.max * scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_errors_equal_those_of_quantising(rough, dtype, axis):
    x = rough.clamp(-60000, 60000).to(dtype) if dtype == torch.float16 else rough.to(dtype)
    found = summarize_blocks(x, axis, MX).errors
    assert set(found) == {fmt.name for fmt in MX}
    for fmt in MX:
        squares, underflow, lost = numpy_error(x, fake_quantize(x, fmt, axis=axis))
        assert found[fmt.name].error_squares == pytest.approx(squares, rel=1e-12), fmt.name
        assert (found[fmt.name].underflow, found[fmt.name].lost) == (underflow, lost), fmt.name
        assert found[fmt.name].saturated == saturated(x, axis, fmt), fmt.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_bf16_value_in_a_block_of_every_exponent(dtype):
    """All 65,536 patterns, sorted so that neighbours share a block, and shuffled so that they do not."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[torch.isfinite(patterns)]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    for x in (finite, shuffled):
        found = summarize_blocks(x.to(dtype), -1, MX).errors
        for fmt in MX:
            squares, underflow, lost = numpy_error(x, fake_quantize(x, fmt))
            assert found[fmt.name].error_squares == pytest.approx(squares, rel=1e-12)
            assert (found[fmt.name].underflow, found[fmt.name].lost) == (underflow, lost)


def test_blocks_with_nan_or_inf_are_lost_whole_and_only_they(rough):
    x = rough.bfloat16()
    x[6, 1], x[7, 79] = float("nan"), float("inf")  # the second in a short block of 16
    found = summarize_blocks(x, 1, MX)
    for fmt in MX:
        squares, underflow, lost = numpy_error(x, fake_quantize(x, fmt))
        assert lost == 31 + 15
        assert found.errors[fmt.name].lost == lost
        assert found.errors[fmt.name].underflow == underflow
        assert found.errors[fmt.name].error_squares == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_histograms_of_scales_and_depths(rough, dtype):
    x = rough.to(dtype)
    found = summarize_blocks(x, 1, MX)
    blocks = np.abs(blocks_of(x, 1))
    amax = blocks.max(axis=1)
    exponents, counts = np.unique(np.frexp(amax[amax > 0])[1] - 1, return_counts=True)
    assert found.amax_exponents == dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    nonzero = blocks > 0
    depth = (np.frexp(amax)[1][:, None] - np.frexp(blocks)[1])[nonzero]
    np.testing.assert_array_equal(found.depths, np.bincount(np.minimum(depth, DEPTHS - 1), minlength=DEPTHS))
    assert found.depths.sum() == int((x != 0).sum())


@pytest.mark.parametrize("shape", [(), (0,), (0, 32), (5, 0), (1,), (33,), (2, 3, 5, 7)])
def test_shapes_without_whole_blocks(shape):
    x = torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = summarize_blocks(x, -1, MX)
    for fmt in MX:
        assert found.errors[fmt.name].error_squares == pytest.approx(numpy_error(x, fake_quantize(x, fmt))[0])
    assert found.depths.sum() == x.numel()


def test_a_tensor_of_many_chunks_and_a_transposed_view():
    x = torch.randn(1000, 700, generator=torch.Generator().manual_seed(1)).bfloat16()
    fmt = FORMATS["mxfp4"]
    for view in (x, x.t()):
        found = summarize_blocks(view, -1, [fmt]).errors["mxfp4"]
        squares, underflow, _ = numpy_error(view, fake_quantize(view, fmt))
        assert found.error_squares == pytest.approx(squares, rel=1e-12)
        assert found.underflow == underflow
