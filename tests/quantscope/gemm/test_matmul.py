import pytest
import torch

from megatron.quantscope.gemm import matmul as door

HALVES = (torch.bfloat16, torch.float16)
by_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    """No choice by hand, and CPU flags read anew by each test."""
    monkeypatch.delenv("QUANTSCOPE_GEMM", raising=False)
    door.cpu_flags.cache_clear()
    yield
    door.cpu_flags.cache_clear()


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return torch.randn(3, 20, 50, generator=numbers).to(dtype), torch.randn(3, 50, 10, generator=numbers).to(dtype)


@pytest.mark.parametrize("choice", ["native", "widened"])
@by_half
def test_product_is_a_float32_sum_rounded_once(dtype, choice, monkeypatch):
    monkeypatch.setenv("QUANTSCOPE_GEMM", choice)
    a, b = operands(dtype)
    product, exact = door.matmul(a, b), a.double() @ b.double()
    assert product.dtype == dtype
    rounding = exact.abs() * torch.finfo(dtype).eps / 2
    summing = (a.double().abs() @ b.double().abs()) * a.shape[-1] * torch.finfo(torch.float32).eps
    assert ((product.double() - exact).abs() <= rounding + summing).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wider_dtypes_are_multiplied_as_they_are(dtype):
    a, b = operands(dtype)
    assert torch.equal(door.matmul(a, b), a @ b)


@by_half
def test_widened_is_the_float32_product_rounded(dtype, monkeypatch):
    monkeypatch.setenv("QUANTSCOPE_GEMM", "widened")
    a, b = operands(dtype)
    assert torch.equal(door.matmul(a, b), (a.float() @ b.float()).to(dtype))


@by_half
def test_native_is_torch(dtype, monkeypatch):
    monkeypatch.setenv("QUANTSCOPE_GEMM", "native")
    a, b = operands(dtype)
    assert torch.equal(door.matmul(a, b), a @ b)


def test_unrounded_product_keeps_float32():
    a, b = operands(torch.bfloat16)
    assert torch.equal(door.matmul_unrounded(a, b), a.float() @ b.float())
    assert door.matmul_unrounded(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("flags", "widened"),
    [
        ("fpu avx2", {torch.bfloat16: True, torch.float16: True}),
        ("avx512f avx512_bf16", {torch.bfloat16: False, torch.float16: True}),
        ("amx_bf16 amx_tile avx512_fp16", {torch.bfloat16: False, torch.float16: False}),
    ],
)
def test_choice_follows_the_cpu_flags(flags, widened, monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: none\n")
    monkeypatch.setattr(door, "_CPU_INFO", info)
    assert {dtype: door.is_widened(torch.empty(1, dtype=dtype)) for dtype in HALVES} == widened
    assert not door.is_widened(torch.empty(1))


def test_system_that_does_not_tell_is_widened(monkeypatch, tmp_path):
    monkeypatch.setattr(door, "_CPU_INFO", tmp_path / "missing")
    assert door.is_widened(torch.empty(1, dtype=torch.bfloat16))


def test_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv("QUANTSCOPE_GEMM", "fast")
    with pytest.raises(ValueError, match="QUANTSCOPE_GEMM='fast' is not allowed: choose from native, widened"):
        door.matmul(*operands(torch.bfloat16))
