"""The same bits on a GPU as on the CPU."""

import pytest
import torch

from megatron.quantscope.formats import FORMATS, fake_quantize, measure

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_cuda_gives_the_bits_of_the_cpu(name, dtype, assert_same_bits):
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(300, 70, generator=numbers) * torch.exp2(20 * torch.randn(300, 70, generator=numbers))
    x = x.to(dtype)
    for axis in (0, 1):
        for scale_rule in ("floor", "rceil"):
            found = fake_quantize(x.cuda(), name, axis=axis, scale_rule=scale_rule)
            assert_same_bits(found.cpu(), fake_quantize(x, name, axis=axis, scale_rule=scale_rule))


@pytest.mark.parametrize("name", ["bf16", "fp16", "hifp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_input(name, dtype, every_pattern, assert_same_bits):
    x = every_pattern(dtype)
    assert_same_bits(fake_quantize(x.cuda(), name).cpu(), fake_quantize(x, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_statistics_are_those_of_the_cpu(dtype):
    x = torch.randn(1_000, 50).to(dtype)
    found, expected = measure(x.cuda()), measure(x)
    assert (found.exponents, found.min, found.max, found.zero) == (
        expected.exponents,
        expected.min,
        expected.max,
        expected.zero,
    )
    assert found.sum_squares == pytest.approx(expected.sum_squares)
