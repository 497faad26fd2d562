"""The captured tensors are the real ones: every result is recomputed from the captured operands and recorded formats.

The formulas are written out here, whole matrices at a time, and share only `fake_quantize` with the library. Linears
must agree bit for bit in fp32 on one thread; attention runs in blocks there and whole here, so that a value can fall on
the other side of a rounding boundary: it must agree far beyond any format's own error.
"""

import math
from collections import defaultdict

import pytest
import torch

from megatron.quantscope.formats import fake_quantize

TYPES = ("none", "bf16", "fp16", "mxfp8", "mxfp4", "hifp8")
LINEARS_A_LAYER = 4
LAYERS = 2
HEAD_DIM = 16
SMALLEST_SQNR_DB = 50.0  # the formats themselves lie between 15 (mxfp4) and 35 dB (hifp8)
LARGEST_OF_FULL_PRECISION = {"hifp8": 15.0, "fp16": 65504.0}  # HiFloat8: 1.111b * 2^3; binary16: its maximum

pytestmark = [pytest.mark.parametrize("quant_type", TYPES)]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def modules(capture, layer_type):
    """(metadata formats, {(operation, name): tensor}) of every captured module and micro-batch."""
    found = defaultdict(dict)
    formats = {}
    for record in capture.records:
        if record.layer_type == layer_type:
            key = (record.module, record.micro_batch)
            found[key][record.operation, record.tensor_name] = capture.load(record)
            formats[key] = record.formats
    return [(formats[key], tensors) for key, tensors in found.items()]


def quantized(tensor, fmt, axis, formats):
    return tensor if fmt == "none" else fake_quantize(tensor, fmt, axis=axis, scale_rule=formats["scale_rule"])


def scaled(grad, fmt, axis, formats):
    """A gradient operand: multiplied by the power of two that brings it into the format's range, and divided by it."""
    if fmt == "none" or formats["grad_scale"] == "none":
        return quantized(grad, fmt, axis, formats)
    assert formats["grad_scale"] == "pow2-amax"
    room = LARGEST_OF_FULL_PRECISION[fmt] / grad.abs().max().item()
    factor = 2.0 ** math.floor(math.log2(room))
    return quantized(grad * factor, fmt, axis, formats) / factor


def scaled_by_head(ds, fmt, axis, formats):
    """ds is never whole in memory, so each sample and head has a factor of its own (one row block at this length)."""
    return torch.stack([torch.stack([scaled(head, fmt, axis, formats) for head in sample]) for sample in ds])


def unquantized(*operands):
    return dict.fromkeys(operands, "none")


def sqnr_db(reference, result):
    noise = (reference.double() - result.double()).square().sum()
    return math.inf if noise == 0 else 10 * torch.log10(reference.double().square().sum() / noise).item()


def test_linears(captured, quant_type):
    linears = modules(captured(quant_type), "linear")
    assert len(linears) == LAYERS * LINEARS_A_LAYER
    for formats, t in linears:
        x, w = t["forward", "input"], t["forward", "weight"]
        dy = t["backward", "grad_output"]
        assert torch.equal(w, t["backward", "weight"])

        f = formats.get("fprop", unquantized("x", "w"))
        y = torch.matmul(quantized(x, f["x"], -1, formats), quantized(w, f["w"], -1, formats).t())
        assert torch.equal(y, t["forward", "output"])

        f = formats.get("dgrad", unquantized("dy", "w"))
        dx = torch.matmul(scaled(dy, f["dy"], -1, formats), quantized(w, f["w"], 0, formats))
        assert torch.equal(dx, t["backward", "grad_input"])

        f = formats.get("wgrad", unquantized("dy", "x"))
        dy_TN, x_TK = dy.flatten(0, -2), x.flatten(0, -2)
        dw = torch.matmul(scaled(dy_TN, f["dy"], 0, formats).t(), quantized(x_TK, f["x"], 0, formats))
        assert torch.equal(dw, t["backward", "grad_weight"])


def test_attention(captured, quant_type):
    attentions = modules(captured(quant_type), "attention")
    assert len(attentions) == LAYERS
    for formats, t in attentions:
        for name, value in attention_results(formats, t).items():
            got = next(tensor for (_, tensor_name), tensor in t.items() if tensor_name == name)
            assert got.shape == value.shape
            assert sqnr_db(value, got) > SMALLEST_SQNR_DB, name


def attention_results(formats, t):
    """Output and gradients of causal attention with GQA, from the formulas of DESIGN 3, one whole matrix a head."""
    q, k, v = (t["forward", name].permute(1, 2, 0, 3) for name in ("query", "key", "value"))  # [b, heads, s, d]
    batch, heads, length, head_dim = q.shape
    group = heads // k.shape[1]
    do = t["backward", "grad_output"].view(length, batch, heads, head_dim).permute(1, 2, 0, 3)
    k_heads, v_heads = (x.repeat_interleave(group, dim=1) for x in (k, v))

    def get(gemm, operand):
        return formats.get(gemm, {}).get(operand, "none")

    scale = 1 / math.sqrt(head_dim)
    product = quantized(q, get("scores", "q"), -1, formats) @ quantized(k_heads, get("scores", "k"), -1, formats).mT
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    p = torch.softmax((product * scale).masked_fill(hidden, -10000.0), -1)
    o = quantized(p, get("context", "p"), -1, formats) @ quantized(v_heads, get("context", "v"), -2, formats)

    dv = quantized(p, get("dv", "p"), -2, formats).mT @ scaled(do, get("dv", "do"), -2, formats)
    dp = scaled(do, get("dp", "do"), -1, formats) @ quantized(v_heads, get("dp", "v"), -1, formats).mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    dq = scaled_by_head(ds, get("dq", "ds"), -1, formats) @ quantized(k_heads, get("dq", "k"), -2, formats) * scale
    dk = scaled_by_head(ds, get("dk", "ds"), -2, formats).mT @ quantized(q, get("dk", "q"), -2, formats) * scale

    dk, dv = (grad.unflatten(1, (-1, group)).sum(2) for grad in (dk, dv))
    results = {"output": o, "grad_query": dq, "grad_key": dk, "grad_value": dv}
    results = {name: result.permute(2, 0, 1, 3) for name, result in results.items()}  # back to [s, b, heads, d]
    return results | {"output": results["output"].reshape(length, batch, heads * head_dim)}
