"""Quantised attention against plain formulas on whole matrices in float64, against torch, and block by block."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.quantscope.gemm import AttentionQuant, attention_blocks
from megatron.quantscope.gemm.attention import attention

CALLS = [
    ("forward", "pre", "query"),
    ("forward", "pre", "key"),
    ("forward", "pre", "value"),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
    ("backward", "post", "grad_query"),
    ("backward", "post", "grad_key"),
    ("backward", "post", "grad_value"),
]
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "explicit": {"mask": torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.3},
    "explicit only": {"causal": False, "mask": torch.ones(70, 70, dtype=torch.bool).triu(3)},
}


def tensors(s=70, b=2, heads=4, groups=2, d=24, dtype=torch.float64, s_k=None):
    """(q, k, v, do) with gradients wanted of the first three."""
    numbers = torch.Generator().manual_seed(0)
    shapes = ((s, b, heads, d), (s_k or s, b, groups, d), (s_k or s, b, groups, d), (s, b, heads * d))
    q, k, v, do = (torch.randn(shape, generator=numbers).to(dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def run(q, k, v, do, quant, **options):
    """(o, dq, dk, dv)."""
    o = attention(q, k, v, quant=quant, softmax_scale=1 / math.sqrt(q.shape[3]), **options)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def plain_attention(q, k, v, do, quant, slow_quantize, causal=True, mask=None):
    """The formulas, one after the other, on whole matrices and one sample and query head at a time."""
    scale = 1 / math.sqrt(q.shape[3])
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    do = do.view(o.shape)
    repeat = q.shape[2] // k.shape[2]

    def quantize(tensor, gemm, operand, axis):
        return slow_quantize(tensor.contiguous(), quant, gemm, operand, axis)

    for sample in range(q.shape[1]):
        hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
        if mask is not None:
            hidden = hidden | (mask[sample, 0] if mask.dim() == 4 else mask)
        if causal:
            hidden = hidden | torch.ones_like(hidden).triu(1)
        for head in range(q.shape[2]):
            group = head // repeat
            qi, ki, vi = (t.detach()[:, sample, i] for t, i in ((q, head), (k, group), (v, group)))
            doi = do[:, sample, head]
            s = quantize(qi, "scores", "q", 1) @ quantize(ki, "scores", "k", 1).t()
            p = torch.softmax((s * scale).masked_fill(hidden, -10000.0), dim=1)
            o[:, sample, head] = quantize(p, "context", "p", 1) @ quantize(vi, "context", "v", 0)
            dv[:, sample, group] += quantize(p, "dv", "p", 0).t() @ quantize(doi, "dv", "do", 0)
            dp = quantize(doi, "dp", "do", 1) @ quantize(vi, "dp", "v", 1).t()
            ds = (p * (dp - (p * dp).sum(dim=1, keepdim=True))).masked_fill(hidden, 0.0)
            dq[:, sample, head] = quantize(ds, "dq", "ds", 1) @ quantize(ki, "dq", "k", 0) * scale
            dk[:, sample, group] += quantize(ds, "dk", "ds", 0).t() @ quantize(qi, "dk", "q", 0) * scale
    return o.flatten(2), dq, dk, dv


def plain_probabilities(q, k, quant, slow_quantize, causal=True, mask=None):
    """p [b, heads, s_q, s_k] by the same formulas."""
    p = torch.empty(q.shape[1], q.shape[2], q.shape[0], k.shape[0], dtype=q.dtype)
    for sample, head in torch.cartesian_prod(torch.arange(q.shape[1]), torch.arange(q.shape[2])).tolist():
        qi, ki = q.detach()[:, sample, head], k.detach()[:, sample, head * k.shape[2] // q.shape[2]]
        qi, ki = (slow_quantize(t.contiguous(), quant, "scores", name, 1) for t, name in ((qi, "q"), (ki, "k")))
        hidden = torch.ones(p.shape[2:], dtype=torch.bool).triu(1) if causal else torch.zeros(1, dtype=torch.bool)
        if mask is not None:
            hidden = hidden | (mask[sample, 0] if mask.dim() == 4 else mask)
        scores = (qi @ ki.t()) / math.sqrt(q.shape[3])
        p[sample, head] = torch.softmax(scores.masked_fill(hidden, -10000.0), dim=1)
    return p


def assert_close(found, expected, rtol=1e-11):
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block_elements", [1 << 20, 1 << 11])
def test_probabilities_are_shown_whole_before_dropout(mask, block_elements, all_formats, slow_quantize, monkeypatch):
    """Also where a head is computed in several blocks (2,048 scores: 32 rows each), and without changing a result."""
    monkeypatch.setattr(attention_blocks, "CPU_BLOCK_ELEMENTS", block_elements)
    quant = all_formats(AttentionQuant, "mxfp8", "mxfp8")
    inputs, shown = tensors(), []
    options = MASKS[mask] | {"dropout": 0.3, "seed": lambda: 7}
    expected = run(*inputs, quant, **options)
    found = run(*inputs, quant, show_probabilities=lambda p: shown.append(p.clone()), **options)
    (p,) = shown  # in the forward pass, and not again in the backward pass
    torch.testing.assert_close(
        p, plain_probabilities(*inputs[:2], quant, slow_quantize, **MASKS[mask]), rtol=1e-11, atol=0
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("forward", "backward"), [("none", "none"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp8_e5m2"), ("hifp8", "bf16")]
)
def test_gemms_are_the_products_of_quantised_operands(mask, forward, backward, all_formats, slow_quantize):
    quant = all_formats(AttentionQuant, forward, backward)
    inputs = tensors()
    assert_close(run(*inputs, quant, **MASKS[mask]), plain_attention(*inputs, quant, slow_quantize, **MASKS[mask]))


def test_each_operand_has_its_own_format(all_formats, slow_quantize):
    """A format in one place changes only what depends on that place."""
    inputs = tensors(s=40, b=1)
    plain = run(*inputs, all_formats(AttentionQuant))
    changed = {}
    for gemm, operands in AttentionQuant.GEMMS.items():
        for operand in operands:
            gemms = {g: dict(o) for g, o in all_formats(AttentionQuant).gemms.items()}
            gemms[gemm][operand] = "mxfp4"
            quant = AttentionQuant(gemms=gemms)
            found = run(*inputs, quant)
            assert_close(found, plain_attention(*inputs, quant, slow_quantize))
            changed[gemm] = {
                n for n, a, b in zip(("o", "dq", "dk", "dv"), found, plain, strict=True) if not torch.equal(a, b)
            }
    assert changed == {
        "scores": {"o", "dq", "dk", "dv"},
        "context": {"o"},
        "dv": {"dv"},
        "dp": {"dq", "dk"},
        "dq": {"dq"},
        "dk": {"dk"},
    }


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_unquantised_is_torch_attention(groups, all_formats):
    q, k, v, do = tensors(groups=groups)
    by_head = [t.repeat_interleave(4 // t.shape[2], dim=2).permute(1, 2, 0, 3) for t in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    assert_close(run(q, k, v, do, all_formats(AttentionQuant)), (o, *torch.autograd.grad(o, (q, k, v), do)))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("limit", [1 << 20, 32 * 40])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"mask": torch.eye(40, dtype=torch.bool)}])
def test_gradients_are_those_of_finite_differences(options, limit, dropout, all_formats, monkeypatch):
    """Dropout replays its masks in the backward pass, in one block and in many: else the gradients would be wrong."""
    monkeypatch.setattr(attention_blocks, "CPU_BLOCK_ELEMENTS", limit)
    q, k, v, _ = tensors(s=40, b=1, heads=2, groups=1, d=2)
    quant = all_formats(AttentionQuant)

    def forward(q, k, v):
        return attention(q, k, v, quant=quant, softmax_scale=0.7, dropout=dropout, seed=lambda: 11, **options)

    assert torch.autograd.gradcheck(forward, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("limit", [1, 70 * 32, 70 * 70, 3 * 70 * 70])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_forward_blocks", "hifp8"])
def test_block_size_does_not_show(name, mask, limit, all_formats, monkeypatch):
    if name == "nvfp4_forward_blocks":  # formats that look at the whole of p or ds may differ there, and only there
        gemms = {g: dict(o) for g, o in all_formats(AttentionQuant, "nvfp4").gemms.items()}
        gemms = {
            g: {o: "mxfp4" if o in ("p", "ds") else f for o, f in operands.items()} for g, operands in gemms.items()
        }
        quant = AttentionQuant(gemms=gemms)
    else:
        quant = all_formats(AttentionQuant, name)
    inputs = tensors()
    whole = run(*inputs, quant, **MASKS[mask])
    monkeypatch.setattr(attention_blocks, "CPU_BLOCK_ELEMENTS", limit)
    assert_close(run(*inputs, quant, **MASKS[mask]), whole)


def test_number_of_heads_does_not_show_in_a_head(all_formats):
    """The largest magnitude of p and ds is a head's own, so it does not matter which heads a rank has."""
    gemms = {
        g: {o: "fp8_e4m3" if o in ("p", "ds") else "none" for o in operands}
        for g, operands in AttentionQuant.GEMMS.items()
    }
    q, k, v, do = tensors(heads=4, groups=4)
    for quant in (AttentionQuant(gemms=gemms), all_formats(AttentionQuant, "mxfp8", "hifp8")):
        whole = run(q, k, v, do, quant)
        half = run(q[:, :, :2], k[:, :, :2], v[:, :, :2], do[..., :48], quant)
        for a, b in zip(half[1:], whole[1:], strict=True):
            torch.testing.assert_close(a, b[:, :, :2], rtol=1e-11, atol=1e-11)


def test_gradient_scale_is_per_head_and_block_for_ds(all_formats):
    """Gradients far below the range of HiFloat8 survive, though one head's are a million times smaller."""
    q, k, v, do = tensors(heads=2, groups=2)
    do = do * 1e-7
    do[..., :24] *= 1e-6
    plain = run(q, k, v, do, all_formats(AttentionQuant))
    gemms = {g: {o: "hifp8" if o == "ds" else "none" for o in operands} for g, operands in AttentionQuant.GEMMS.items()}
    scaled = run(q, k, v, do, AttentionQuant(gemms=gemms, grad_scale="pow2-amax"))
    lost = run(q, k, v, do, AttentionQuant(gemms=gemms))
    for head in range(2):
        for a, b, c in zip(scaled[1:3], plain[1:3], lost[1:3], strict=True):
            assert (a - b)[:, :, head].norm() < 0.05 * b[:, :, head].norm()
            assert (c - b)[:, :, head].norm() > 0.5 * b[:, :, head].norm()


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compute_dtype_is_kept_and_near_float64(dtype, in_fp32, all_formats):
    quant = all_formats(AttentionQuant)
    inputs = tensors(dtype=dtype)
    found = run(*inputs, quant, softmax_in_fp32=in_fp32)
    assert {t.dtype for t in found} == {dtype}
    exact = run(*(t.detach().double().requires_grad_(t.requires_grad) for t in inputs), quant)
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() < 4 * torch.finfo(dtype).eps * b.norm()


def test_bf16_rounds_where_megatron_core_does(all_formats):
    """s, p, ds and every product are rounded to bf16, the softmax runs in float32: autograd on these very steps."""
    q, k, v, do = tensors(s=64, b=1, heads=2, groups=2, d=16, dtype=torch.bfloat16)
    by_head = [t.permute(1, 2, 0, 3)[0] for t in (q, k, v)]
    s = torch.matmul(by_head[0], by_head[1].transpose(1, 2)).float() * 0.25
    p = torch.softmax(s.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -10000.0), dim=-1).bfloat16()
    o = torch.matmul(p, by_head[2]).permute(1, 0, 2)[:, None].flatten(2)
    expected = (o, *torch.autograd.grad(o, (q, k, v), do))
    assert_close(run(q, k, v, do, all_formats(AttentionQuant, "bf16")), expected, rtol=2**-7)
    assert torch.equal(run(q, k, v, do, all_formats(AttentionQuant, "bf16"))[0], o)


def test_context_parallel_halves_are_the_whole(all_formats):
    """Two ranks with zigzag queries and all keys, in an order of their own: rows of o agree, dk and dv add up."""
    q, k, v, do = tensors(s=64)
    order = torch.cat([torch.arange(0, 16), torch.arange(48, 64), torch.arange(16, 48)])
    for quant in (all_formats(AttentionQuant), all_formats(AttentionQuant, "mxfp8", "none")):
        whole = run(q, k[order], v[order], do, quant, query_positions=torch.arange(64), key_positions=order)
        parts = [
            run(q[rows], k[order], v[order], do[rows], quant, query_positions=rows, key_positions=order)
            for rows in (order[:32], order[32:])
        ]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole[0][order])
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole[1][order])
    plain = all_formats(AttentionQuant)
    whole = run(q, k, v, do, plain)
    parts = [
        run(q[rows], k[order], v[order], do[rows], plain, query_positions=rows, key_positions=order)
        for rows in (order[:32], order[32:])
    ]
    torch.testing.assert_close(parts[0][2] + parts[1][2], whole[2][order])
    torch.testing.assert_close(parts[0][3] + parts[1][3], whole[3][order])


def test_more_keys_than_queries_without_causality(all_formats, slow_quantize):
    inputs = tensors(s=33, s_k=50)
    quant = all_formats(AttentionQuant, "mxfp8")
    assert_close(run(*inputs, quant, causal=False), plain_attention(*inputs, quant, slow_quantize, causal=False))


def test_wholly_hidden_row_attends_to_all_keys_alike(all_formats):
    """As in megatron-core, whose hidden scores are -10000 and not -Inf; and no gradient goes through them."""
    q, k, v, do = tensors(s=40)
    mask = torch.zeros(1, 1, 40, 40, dtype=torch.bool)
    mask[..., 7, :] = True
    o, dq, _, _ = run(q, k, v, do, all_formats(AttentionQuant), mask=mask)
    average = v.mean(dim=0).repeat_interleave(2, dim=1).flatten(1)
    torch.testing.assert_close(o[7], average)
    assert (dq[7] == 0).all()


def test_dropout_drops_its_share_and_keeps_the_mean(all_formats):
    q, k, v, _ = tensors(s=64, heads=8, groups=8)
    quant, seeds = all_formats(AttentionQuant), iter((1, 1, 2))
    options = {"quant": quant, "softmax_scale": 0.0, "causal": False, "dropout": 0.25, "seed": lambda: next(seeds)}
    ones = torch.ones_like(v)  # p is uniform and v is 1, so o is the share that stays, scaled up
    first, again, other = (attention(q, k, ones, **options) for _ in range(3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.mean().item() == pytest.approx(1.0, abs=0.01)
    counts = (first * 0.75 * 64).unique()
    torch.testing.assert_close(counts, counts.round())


def test_seed_is_drawn_once_and_only_for_dropout(all_formats):
    drawn = []
    inputs = tensors(s=8)
    for dropout in (0.0, 0.1):
        run(*inputs, all_formats(AttentionQuant), dropout=dropout, seed=lambda: drawn.append(1) or 5)
    assert len(drawn) == 1


def test_callers_random_numbers_are_left_alone(all_formats):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    run(*tensors(s=8), all_formats(AttentionQuant), dropout=0.5, seed=lambda: 1)
    assert torch.equal(torch.rand(4), expected)


def test_tap_sees_operands_and_results_in_order(all_formats, recorder):
    q, k, v, do = tensors()
    quant = all_formats(AttentionQuant, "mxfp8")
    o, dq, dk, dv = run(q, k, v, do, quant, tap=recorder)
    assert recorder.calls == CALLS
    for call, tensor in zip(CALLS, (q, k, v, o, do, dq, dk, dv), strict=True):
        assert torch.equal(recorder.tensors[call].view(tensor.shape), tensor), call
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, do, quant), (o, dq, dk, dv), strict=True))


def test_gradients_that_are_not_needed_are_not_tapped(all_formats, recorder):
    q, k, v, do = tensors()
    quant = all_formats(AttentionQuant, "mxfp8")
    whole = run(q, k, v, do, quant)
    o = attention(q.detach(), k, v.detach(), quant=quant, softmax_scale=1 / math.sqrt(24), tap=recorder)
    (dk,) = torch.autograd.grad(o, k, do)
    assert recorder.calls == [*CALLS[:5], CALLS[6]]
    assert torch.equal(dk, whole[2])


def test_heads_on_ranks_share_the_amax_of_the_whole(all_formats):
    """q, k, v and do of fp8 have one scale over all heads."""
    gemms = {
        g: {o: "none" if o in ("p", "ds") else f for o, f in operands.items()}
        for g, operands in all_formats(AttentionQuant, "fp8_e4m3").gemms.items()
    }
    quant = AttentionQuant(gemms=gemms)
    q, k, v, do = tensors()
    whole = run(q, k, v, do, quant)
    amax = {name: t.detach().abs().max().float() for name, t in (("q", q), ("k", k), ("v", v), ("do", do))}
    queue = iter([amax[name] for name in ("q", "k", "v", "q", "k", "do", "do", "v", "k", "q")])
    part = run(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], do[..., 48:], quant, reduce_amax=lambda _: next(queue))
    assert_close(part, (whole[0][..., 48:], whole[1][:, :, 2:], whole[2][:, :, 1:], whole[3][:, :, 1:]))


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = (t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(result) if torch.is_tensor(t))
        self.elements = max(self.elements, *storages, 0)
        return result


@pytest.mark.parametrize("name", ["mxfp8", "hifp8"])
def test_no_tensor_is_larger_than_a_block(name, all_formats):
    """2,048 tokens x 4 heads: a whole p would be 16 times the block."""
    q, k, v, do = tensors(s=2048, b=1, heads=4, groups=2, d=16, dtype=torch.bfloat16)
    quant = all_formats(AttentionQuant, name, grad_scale="pow2-amax" if name == "hifp8" else "none")
    with LargestTensor() as largest:
        run(q, k, v, do, quant, dropout=0.1, seed=lambda: 1)
    assert largest.elements <= attention_blocks.CPU_BLOCK_ELEMENTS < 4 * 2048 * 2048 / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(8, 2, 24)}, r"q \[8, 2, 24\].*each must be \[sequence, batch, heads, head_dim\]"),
        ({"v": torch.zeros(9, 2, 2, 24)}, "k and v must share all but head_dim"),
        ({"k": torch.zeros(8, 2, 2, 16)}, "q must have their batch and k's head_dim"),
        ({"q": torch.zeros(8, 2, 3, 24)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"dropout": 0.1}, "dropout 0.1 needs a seed to draw from"),
        ({"dropout": 1.0}, r"dropout 1.0 is not allowed: it must be in \[0, 1\)"),
        (
            {"mask": torch.zeros(8, 7, dtype=torch.bool)},
            r"the mask is \[8, 7\]; it must be broadcastable to \[2, 1, 8, 8\]",
        ),
        ({"mask": torch.zeros(2, 4, 8, 8, dtype=torch.bool)}, r"the mask is \[2, 4, 8, 8\]"),
    ],
)
def test_bad_arguments_are_named_in_one_line(change, message, all_formats):
    q, k, v, _ = tensors(s=8)
    arguments = {"q": q, "k": k, "v": v, "quant": all_formats(AttentionQuant), "softmax_scale": 1.0} | change
    with pytest.raises(ValueError, match=message) as error:
        attention(**arguments)
    assert "\n" not in str(error.value)
