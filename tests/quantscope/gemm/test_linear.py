"""The quantised linear layer against plain formulas in float64, and without quantisation against torch, bit by bit."""

import pytest
import torch

from megatron.quantscope.gemm import LinearQuant
from megatron.quantscope.gemm.linear import linear

S, B, K, N = 20, 3, 40, 70  # T = 60: no multiple of a block, nor are K and N
FORWARD_CALLS = [("forward", "pre", "input"), ("forward", "pre", "weight"), ("forward", "post", "output")]
BACKWARD_CALLS = [
    ("backward", "pre", "grad_output"),
    ("backward", "pre", "weight"),
    ("backward", "post", "grad_input"),
    ("backward", "post", "grad_weight"),
]


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [s, b, K], w [N, K], dy [s, b, N])."""
    numbers = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=numbers) for shape in ((S, B, K), (N, K), (S, B, N)))
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), dy.to(dtype)


def run(x, w, dy, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = linear(x, w, **options)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return y.detach(), dx, dw


@pytest.mark.parametrize("scale_rule", ["floor", "rceil"])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [("mxfp8", "mxfp8"), ("mxfp4", "mxfp8_e5m2"), ("hifp8", "hifp8"), ("nvfp4", "fp8_e5m2"), ("bf16", "none")],
)
def test_gemms_are_the_products_of_quantised_operands(forward, backward, scale_rule, all_formats, slow_quantize):
    quant = all_formats(LinearQuant, forward, backward, scale_rule=scale_rule)
    x, w, dy = tensors()
    y, dx, dw = run(x, w, dy, quant=quant)

    def operand(tensor, gemm, name, axis):
        return slow_quantize(tensor.detach().reshape(-1, tensor.shape[-1]), quant, gemm, name, axis)

    y_TN = operand(x, "fprop", "x", 1) @ operand(w, "fprop", "w", 1).t()
    dx_TK = operand(dy, "dgrad", "dy", 1) @ operand(w, "dgrad", "w", 0)
    dw_NK = operand(dy, "wgrad", "dy", 0).t() @ operand(x, "wgrad", "x", 0)
    torch.testing.assert_close(y, y_TN.view(S, B, N), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, dx_TK.view(S, B, K), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dw, dw_NK, rtol=1e-12, atol=1e-12)


def test_bf16_run_keeps_its_dtype_and_rounds_once(all_formats, slow_quantize):
    quant = all_formats(LinearQuant, "mxfp8")
    x, w, dy = tensors(torch.bfloat16)
    results = run(x, w, dy, quant=quant)
    assert {result.dtype for result in results} == {torch.bfloat16}
    exact = run(*(t.detach().double().requires_grad_(t.requires_grad) for t in (x, w, dy)), quant=quant)
    for result, wide in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), wide, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unquantised_is_torch_bit_by_bit(dtype):
    x, w, dy = tensors(dtype)
    y, dx, dw = run(x, w, dy, quant=None)
    assert torch.equal(y, torch.matmul(x, w.t()))
    assert torch.equal(dx, dy.matmul(w))
    assert torch.equal(dw, dy.view(-1, N).t().matmul(x.view(-1, K)))


def test_only_named_operands_are_quantised(all_formats):
    gemms = all_formats(LinearQuant).gemms | {"dgrad": {"dy": "none", "w": "mxfp4"}}
    x, w, dy = tensors()
    found, plain = (run(x, w, dy, quant=quant) for quant in (LinearQuant(gemms=gemms), all_formats(LinearQuant)))
    assert [torch.equal(a, b) for a, b in zip(found, plain, strict=True)] == [True, False, True]


@pytest.mark.parametrize("quantised", [True, False])
def test_bias_is_added_and_has_a_gradient(quantised, all_formats, recorder):
    quant = all_formats(LinearQuant, "mxfp8") if quantised else None
    x, w, dy = tensors()
    bias = torch.randn(N, dtype=torch.float64, requires_grad=True)
    y = linear(x, w, bias, quant=quant, tap=recorder)
    product = linear(x, w, quant=quant)
    assert torch.equal(y, product + bias)
    assert torch.equal(recorder.tensors["forward", "post", "output"], product)
    (dbias,) = torch.autograd.grad(y, bias, dy)
    torch.testing.assert_close(dbias, dy.sum(dim=(0, 1)))


@pytest.mark.parametrize("quantised", [True, False])
def test_tap_sees_operands_and_results_in_order(quantised, all_formats, recorder):
    quant = all_formats(LinearQuant, "mxfp8") if quantised else None
    x, w, dy = tensors()
    y, dx, dw = run(x, w, dy, quant=quant, tap=recorder)
    assert recorder.calls == FORWARD_CALLS + BACKWARD_CALLS
    expected = dict(zip(FORWARD_CALLS + BACKWARD_CALLS, (x, w, y, dy, w, dx, dw), strict=True))
    for call, tensor in expected.items():
        assert torch.equal(recorder.tensors[call], tensor), call


@pytest.mark.parametrize("quantised", [True, False])
def test_tap_changes_nothing(quantised, all_formats, recorder):
    quant = all_formats(LinearQuant, "mxfp8") if quantised else None
    x, w, dy = tensors(torch.bfloat16)
    for plain, tapped in zip(run(x, w, dy, quant=quant), run(x, w, dy, quant=quant, tap=recorder), strict=True):
        assert torch.equal(plain, tapped)


def test_what_autograd_does_not_need_is_not_computed(all_formats, recorder):
    x, w, dy = tensors()
    quant = all_formats(LinearQuant, "mxfp8")
    linear(x.detach(), w, quant=quant, tap=recorder).backward(dy)
    assert recorder.calls == [*FORWARD_CALLS, BACKWARD_CALLS[0], BACKWARD_CALLS[3]]
    recorder.calls.clear()
    linear(x, w.detach(), quant=quant, tap=recorder).backward(dy)
    assert recorder.calls == FORWARD_CALLS + BACKWARD_CALLS[:3]


def test_evaluation_needs_no_backward(all_formats, recorder):
    x, w, _ = tensors()
    with torch.no_grad():
        y = linear(x, w, quant=all_formats(LinearQuant, "mxfp8"), tap=recorder)
    assert not y.requires_grad
    assert recorder.calls == FORWARD_CALLS


@pytest.mark.parametrize("tapped", [True, False])
@pytest.mark.parametrize("name", ["mxfp8", "none", None])
def test_accumulate_takes_over_the_weight_gradient(name, tapped, all_formats, recorder):
    quant = None if name is None else all_formats(LinearQuant, name)
    x, w, dy = tensors()
    _, _, dw = run(x, w, dy, quant=quant)
    main_grad, dummy = torch.ones_like(w), torch.zeros_like(w)

    def accumulate(x_TK: torch.Tensor, dy_TN: torch.Tensor) -> torch.Tensor:
        main_grad.addmm_(dy_TN.t(), x_TK)
        return dummy

    tap = recorder if tapped else None
    returned = torch.autograd.grad(linear(x, w, quant=quant, tap=tap, accumulate=accumulate), w, dy)
    torch.testing.assert_close(main_grad, dw + 1, rtol=1e-12, atol=1e-12)
    assert torch.equal(returned[0], dummy)
    if tapped:
        assert torch.equal(recorder.tensors["backward", "post", "grad_weight"], dw)


def test_accumulate_may_leave_no_gradient():
    x, w, dy = tensors()
    linear(x, w, quant=None, accumulate=lambda x_TK, dy_TN: None).backward(dy)
    assert w.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("name", ["mxfp8", "fp8_e4m3", None])
@pytest.mark.parametrize("shape", [(K,), (7, K), (2, 3, 4, K), (0, 3, K)])
def test_any_leading_shape(shape, name, all_formats):
    quant = None if name is None else all_formats(LinearQuant, name)
    x = torch.randn(shape, requires_grad=True)
    w = torch.randn(N, K, requires_grad=True)
    y = linear(x, w, quant=quant)
    assert y.shape == (*shape[:-1], N)
    y.sum().backward()  # a gradient that is one expanded number
    assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)


def test_layout_of_x_does_not_matter(all_formats):
    quant = all_formats(LinearQuant, "mxfp8")
    x, w, dy = tensors()
    other = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for a, b in zip(run(x, w, dy, quant=quant), run(other, w, dy, quant=quant), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_column_shards_with_the_amax_of_the_whole_are_the_whole(name, all_formats):
    """Two ranks of a column-parallel layer: w and dy are split over N, in whole blocks."""
    quant = all_formats(LinearQuant, name)
    x, w, dy = (t[..., :64, :] if t.shape[0] == N else t for t in tensors())
    dy = dy[..., :64]
    whole = run(x, w, dy, quant=quant)
    amaxes = [{"x": x, "w": w, "dy": dy}[operand].abs().max().float() for operand in ("x", "w", "dy", "w", "x", "dy")]
    half = []
    for part in (slice(0, 32), slice(32, 64)):
        queue = iter(amaxes)
        half.append(run(x, w[part], dy[..., part], quant=quant, reduce_amax=lambda amax, queue=queue: next(queue)))
    torch.testing.assert_close(torch.cat([half[0][0], half[1][0]], dim=-1), whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(half[0][1] + half[1][1], whole[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([half[0][2], half[1][2]]), whole[2], rtol=1e-12, atol=1e-12)
