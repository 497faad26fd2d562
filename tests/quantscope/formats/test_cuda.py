"""The same bits on a GPU as on the CPU, from every backend that runs there: `test_triton.py` runs there too."""

import pytest
import torch

from megatron.quantscope.formats import FORMATS, catalog, fake_quantize, measure, quantize
from megatron.quantscope.formats.dispatch import fake_quantize_both

pytestmark = pytest.mark.gpu

DTYPES = {
    "torch": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
    "triton": [torch.bfloat16, torch.float16, torch.float32],
}
ELEMENTS = [catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1]
UNSCALED = [*ELEMENTS, *(fmt for fmt in FORMATS.values() if fmt.scale is None)]
BLOCKED = [name for name, fmt in FORMATS.items() if fmt.block]
by_name = pytest.mark.parametrize("name", FORMATS)
by_backend = pytest.mark.parametrize("backend", DTYPES)
by_backend_and_dtype = pytest.mark.parametrize(
    ("backend", "dtype"), [(backend, dtype) for backend, dtypes in DTYPES.items() for dtype in dtypes], ids=str
)


def sample(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(0)
    magnitudes = torch.exp2(20 * torch.randn(shape, generator=numbers))
    return (torch.randn(shape, generator=numbers) * magnitudes).to(dtype)


@by_backend_and_dtype
@by_name
def test_cuda_gives_the_bits_of_the_cpu(name, backend, dtype, assert_same_bits):
    for shape in ((300, 70), (64, 256), (3, 33, 18)):
        x = sample(*shape, dtype=dtype)
        for axis in range(x.dim()):
            for scale_rule in ("floor", "rceil"):
                found = fake_quantize(x.cuda(), name, axis=axis, scale_rule=scale_rule, backend=backend)
                expected = fake_quantize(x, name, axis=axis, scale_rule=scale_rule, backend="torch")
                assert_same_bits(found.cpu(), expected)


@pytest.mark.parametrize("name", BLOCKED)
def test_cuda_gives_the_bits_of_the_reference(name, assert_same_bits):
    x = sample(40, 70, dtype=torch.bfloat16)
    x[3, 5], x[20, 40], x[30] = float("nan"), float("inf"), 0.0
    for axis in (0, 1):
        expected = fake_quantize(x, name, axis=axis, backend="reference")
        assert_same_bits(fake_quantize(x.cuda(), name, axis=axis).cpu(), expected)


@by_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", UNSCALED, ids=lambda fmt: fmt.name)
def test_every_16_bit_input(fmt, dtype, backend, every_pattern, assert_same_bits):
    x = every_pattern(dtype)
    for saturate in (True, False) if fmt.has_inf or fmt.has_nan else (True,):
        found = fake_quantize(x.cuda(), fmt, saturate=saturate, backend=backend)
        assert_same_bits(found.cpu(), fake_quantize(x, fmt, saturate=saturate, backend="torch"))


@by_name
@pytest.mark.parametrize("dtype", DTYPES["triton"], ids=str)
def test_every_scale_of_every_dtype(name, dtype, assert_same_bits):
    """A row of numbers at every power of two that float32 has, subnormals among them."""
    exponents = torch.arange(-160, 129, dtype=torch.float64)[:, None]
    numbers = torch.randn(len(exponents), 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = (numbers * torch.exp2(exponents)).to(dtype)
    for rows in (x, x.nan_to_num(posinf=0.0, neginf=0.0)):
        for axis in (0, 1):
            found = fake_quantize(rows.cuda(), name, axis=axis, backend="triton")
            assert_same_bits(found.cpu(), fake_quantize(rows, name, axis=axis, backend="torch"))


@pytest.mark.parametrize("dtype", DTYPES["triton"], ids=str)
@pytest.mark.parametrize("name", BLOCKED)
def test_both_axes_at_once(name, dtype, assert_same_bits):
    for shape in ((300, 70), (256, 512), (1, 1)):
        x = sample(*shape, dtype=dtype)
        found = fake_quantize_both(x.cuda(), name, backend="triton")
        for axis, result in zip((1, 0), found, strict=True):
            assert_same_bits(result.cpu(), fake_quantize(x, name, axis=axis, backend="torch"))


@by_backend
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.bits <= 8])
def test_codes_are_those_of_the_cpu(name, backend):
    x = sample(37, 70, dtype=torch.bfloat16)
    x[3, 5], x[20, 40], x[30] = -float("nan"), float("inf"), -0.0
    for axis in (0, 1):
        found = quantize(x.cuda(), name, axis=axis, backend=backend)
        expected = quantize(x, name, axis=axis, backend="torch")
        for part, other in zip(found, expected, strict=True):
            assert (part is None) == (other is None)
            assert part is None or torch.equal(part.cpu(), other)


@by_name
def test_in_place_on_cuda(name, assert_same_bits):
    x = sample(100, 96, dtype=torch.bfloat16)
    for axis in (0, 1):
        found = x.cuda()
        fake_quantize(found, name, axis=axis, out=found, backend="triton")
        assert_same_bits(found.cpu(), fake_quantize(x, name, axis=axis, backend="torch"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8", "hifp8", "fp8_e4m3"])
def test_more_than_2_to_the_31_elements(name, assert_same_bits):
    """The last rows of a tensor of 4.3 GB are what they are alone, blocks along either axis."""
    rows, columns = (1 << 16) + 64, 1 << 15
    amax = torch.tensor(8.0)
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-64:] = torch.randn(64, columns, device="cuda")
    last = x[-64:].clone()
    for axis in (0, 1):
        found = fake_quantize(x, name, axis=axis, amax=amax, backend="triton")
        expected = fake_quantize(last, name, axis=axis, amax=amax, backend="triton")
        assert_same_bits(found[-64:].cpu(), expected.cpu())
        assert not found[:-64].any()
        del found


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
