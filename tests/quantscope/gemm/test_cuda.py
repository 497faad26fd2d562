"""Linear and attention on a GPU near those on the CPU (float64, where only the order of sums differs)."""

import pytest
import torch

from megatron.quantscope.gemm import AttentionQuant, LinearQuant, attention_blocks
from megatron.quantscope.gemm.attention import attention
from megatron.quantscope.gemm.linear import linear

pytestmark = pytest.mark.gpu
by_name = pytest.mark.parametrize(
    ("name", "grad_scale"), [("mxfp8", "none"), ("hifp8", "pow2-amax"), ("nvfp4", "none")]
)


def on_both(forward, *inputs: torch.Tensor) -> None:
    results = []
    for device in ("cpu", "cuda"):
        moved = [t.to(device).requires_grad_() for t in inputs]
        out = forward(*moved)
        results.append([t.cpu() for t in (out.detach(), *torch.autograd.grad(out.square().sum(), moved))])
    for on_cpu, on_cuda in zip(*results, strict=True):
        torch.testing.assert_close(on_cuda, on_cpu)


@by_name
def test_linear(name, grad_scale, all_formats):
    quant = all_formats(LinearQuant, name, grad_scale=grad_scale)
    on_both(lambda x, w: linear(x, w, quant=quant), torch.randn(40, 2, 64).double(), torch.randn(96, 64).double())


@by_name
def test_attention(name, grad_scale, all_formats, monkeypatch):
    monkeypatch.setattr(attention_blocks, "DEVICE_BLOCK_ELEMENTS", attention_blocks.CPU_BLOCK_ELEMENTS)
    quant = all_formats(AttentionQuant, name, grad_scale=grad_scale)
    q, k, v = (torch.randn(80, 2, heads, 32).double() for heads in (4, 2, 2))
    on_both(lambda q, k, v: attention(q, k, v, quant=quant, softmax_scale=0.2), q, k, v)
