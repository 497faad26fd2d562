"""The door: what it takes, what it refuses, and that how a tensor lies in memory does not matter."""

import pytest
import torch

from megatron.quantscope.formats import FORMATS, catalog, fake_quantize, rounding, slabs
from megatron.quantscope.formats.torch_backend import rounded_to_odd

NAMES = list(FORMATS)
by_name = pytest.mark.parametrize("name", NAMES)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=numbers) * torch.exp2(4 * torch.randn(shape, generator=numbers))).to(dtype)


@by_name
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_result_is_like_x(name, dtype):
    x = sample(6, 40, dtype=dtype)
    y = fake_quantize(x, name)
    assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
    assert y.data_ptr() != x.data_ptr()


@by_name
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_backends_agree_in_every_dtype_along_every_axis(name, dtype, assert_same_bits):
    x = sample(3, 33, 18, dtype=dtype)
    for axis in range(-3, 3):
        fast, slow = (fake_quantize(x, name, axis=axis, backend=backend) for backend in ("torch", "reference"))
        assert_same_bits(fast, slow)


@by_name
def test_any_layout_gives_the_values_of_a_contiguous_tensor(name, assert_same_bits):
    x = sample(4, 70, 6)
    layouts = {
        "permuted": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every other column": torch.stack([x, -x], dim=-1)[..., 0],
        "channels moved": x.transpose(0, 1).contiguous().transpose(0, 1),
        "offset": torch.cat([torch.ones(1), x.flatten()])[1:].view(x.shape),
    }
    for axis in range(3):
        expected = fake_quantize(x, name, axis=axis)
        for layout in layouts.values():
            assert_same_bits(fake_quantize(layout, name, axis=axis), expected)
    row = x[:1].expand(4, -1, -1)
    assert_same_bits(fake_quantize(row, name, axis=1), fake_quantize(row.contiguous(), name, axis=1))


@by_name
def test_slab_size_does_not_show(name, assert_same_bits, monkeypatch):
    x = sample(5, 70, 9)
    expected = [fake_quantize(x, name, axis=axis) for axis in range(3)]
    for elements in (1, 50, 700):
        monkeypatch.setattr(slabs, "CPU_SLAB_ELEMENTS", elements)
        for axis in range(3):
            assert_same_bits(fake_quantize(x, name, axis=axis), expected[axis])


@by_name
def test_out_and_in_place(name, assert_same_bits):
    x = sample(7, 50)
    expected = fake_quantize(x, name)
    out = torch.empty_like(x)
    assert fake_quantize(x, name, out=out) is out
    assert_same_bits(out, expected)
    transposed = torch.empty(50, 7).t()
    fake_quantize(x, name, out=transposed)
    assert_same_bits(transposed, expected)
    gaps = torch.zeros(7, 100)[:, ::2]
    fake_quantize(x, name, out=gaps)
    assert_same_bits(gaps, expected)
    original = x.clone()
    assert fake_quantize(x, name, out=x) is x
    assert_same_bits(x, expected)
    every_other = torch.stack([original, original], dim=-1)[..., 0]
    fake_quantize(every_other, name, out=every_other)
    assert_same_bits(every_other, expected)


@by_name
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty_tensors(name, shape):
    assert fake_quantize(torch.empty(shape), name).shape == shape


@by_name
def test_single_number(name, assert_same_bits):
    assert_same_bits(fake_quantize(torch.tensor(1.7), name), fake_quantize(torch.tensor([1.7]), name)[0])


@by_name
def test_no_part_of_the_graph(name):
    x = sample(2, 32).requires_grad_()
    assert not fake_quantize(x, name).requires_grad
    assert fake_quantize(torch.nn.Parameter(sample(2, 32)), name).grad_fn is None


def test_x_is_not_changed():
    x = sample(4, 64)
    before = x.clone()
    for name in NAMES:
        fake_quantize(x, name)
        assert torch.equal(x, before)


def test_a_record_is_as_good_as_a_name(assert_same_bits):
    x = sample(3, 32)
    assert_same_bits(fake_quantize(x, FORMATS["mxfp4"]), fake_quantize(x, "mxfp4"))
    assert_same_bits(fake_quantize(x, "mxfp8_e4m3"), fake_quantize(x, "mxfp8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fmt": "fp3"}, "unknown number format 'fp3': choose from bf16, .*hifp8"),
        ({"axis": 2}, "axis 2 is not allowed for 2 dimensions: choose -2 to 1"),
        ({"axis": -3}, "axis -3 is not allowed"),
        ({"scale_rule": "up"}, "unknown scale rule 'up': choose from floor, rceil"),
        ({"backend": "cuda"}, "unknown backend 'cuda': choose from auto, cpp, triton, torch, reference"),
        ({"out": torch.empty(2, 3)}, r"out is torch.float32 \[2, 3\] on cpu; it must be as x: torch.float32 \[2, 32\]"),
        ({"out": torch.empty(2, 32).half()}, "out is torch.float16"),
        ({"fmt": "mxfp4", "saturate": False}, "saturate=False is not allowed for mxfp4"),
    ],
)
def test_bad_arguments_are_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        fake_quantize(torch.ones(2, 32), **({"fmt": "mxfp8"} | arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"a tensor of {dtype} can not be quantised: it must be one of bfloat16"):
        fake_quantize(torch.zeros(4).to(dtype), "mxfp8")


def test_rounding_to_odd_never_rounds_twice():
    """A float64 just above a tie of E4M3: by way of the nearest float32 it would become the tie and round down."""
    x = torch.tensor([1.0625 + 2.0**-40, 1.0625, 1.0625 - 2.0**-40], dtype=torch.float64)
    assert fake_quantize(x, catalog.E4M3).tolist() == [1.125, 1.0, 1.0]
    assert fake_quantize(x.float().double(), catalog.E4M3).tolist() == [1.0, 1.0, 1.0]


def test_rounding_to_odd_truncates_and_marks_what_it_lost():
    exact = torch.tensor([1.0, -2.5, 0.0, 1e-45, float("inf")], dtype=torch.float64).float().double()
    assert torch.equal(rounded_to_odd(exact), exact.float())
    lost = rounded_to_odd(torch.tensor([1.0 + 2.0**-30, -1.0 - 2.0**-24 * 1.9, 1e300, 1e-300], dtype=torch.float64))
    assert (lost.view(torch.int32) & 1).tolist() == [1, 1, 1, 1]
    assert lost.tolist() == [1.0 + 2.0**-23, -1.0 - 2.0**-23, torch.finfo(torch.float32).max, 2.0**-149]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@by_name
def test_the_default_dtype_does_not_matter(name, dtype, assert_same_bits):
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    expected = fake_quantize(x, name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert_same_bits(fake_quantize(x, name), expected)
    finally:
        torch.set_default_dtype(before)


@by_name
def test_the_default_device_does_not_matter(name, backend, assert_same_bits):
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    rounding._half_away_tables.cache_clear()
    with torch.device("meta"):
        first = fake_quantize(x, name, backend=backend)
    assert_same_bits(fake_quantize(x, name, backend=backend), first)


def test_autograd_notices_what_was_written_over(backend):
    w = torch.ones(64, requires_grad=True)
    h = w * 1
    z = h.sin()
    fake_quantize(h, "mxfp4", out=h.detach(), backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@by_name
def test_an_out_that_overlaps_x_elsewhere(name, backend, assert_same_bits):
    memory = torch.randn(32 * 9, generator=torch.Generator().manual_seed(0))
    x, out = memory[:-32], memory[32:]
    expected = fake_quantize(x.clone(), name)
    assert_same_bits(fake_quantize(x, name, out=out, backend=backend), expected)


@pytest.mark.parametrize("amax", [3.0, torch.ones(2), torch.tensor(3)], ids=["a float", "two", "an integer"])
def test_an_amax_is_one_number_in_a_tensor(amax):
    with pytest.raises(ValueError, match=r"^amax is .* it must be a floating-point tensor of one element$"):
        fake_quantize(torch.ones(4), "fp8_e4m3", amax=amax)
