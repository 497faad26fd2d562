import json
import math

import pytest
import torch

from megatron.quantscope.formats import fake_quantize
from megatron.quantscope.gemm import AttentionQuant, LinearQuant
from megatron.quantscope.gemm.operands import pow2_scale


def linear_quant(forward: str = "mxfp8", backward: str = "mxfp8", **rules) -> LinearQuant:
    return LinearQuant(
        gemms={
            "fprop": {"x": forward, "w": forward},
            "dgrad": {"dy": backward, "w": forward},
            "wgrad": {"dy": backward, "x": forward},
        },
        **rules,
    )


def gradient(scale: float = 1e-6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(12, 64, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


def test_formats_are_plain_json_and_come_back():
    quant = linear_quant("mxfp4", "none", scale_rule="rceil", grad_scale=1024.0)
    data = json.loads(json.dumps(quant.formats()))
    assert data["dgrad"] == {"dy": "none", "w": "mxfp4"}
    assert (data["scale_rule"], data["grad_scale"]) == ("rceil", 1024.0)
    assert LinearQuant.from_formats(data) == quant


def test_attention_formats_come_back():
    gemms = {gemm: dict.fromkeys(operands, "hifp8") for gemm, operands in AttentionQuant.GEMMS.items()}
    quant = AttentionQuant(gemms=gemms, grad_scale="pow2-amax")
    assert AttentionQuant.from_formats(quant.formats()) == quant
    assert list(quant.formats()) == ["scores", "context", "dv", "dp", "dq", "dk", "scale_rule", "grad_scale"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fprop": {"x": "mxfp8"}}, "LinearQuant has GEMMs"),
        ({"scores": {"q": "mxfp8", "k": "mxfp8"}}, "LinearQuant has GEMMs"),
        ({"fprop": {"x": "mxfp8", "w": "fp3"}}, "unknown number format 'fp3'"),
        ({"scale_rule": "up"}, "unknown scale rule 'up': choose from floor, rceil"),
        ({"grad_scale": "amax"}, "gradient scale 'amax' is not allowed: give none, pow2-amax or a power of two"),
        ({"grad_scale": 3.0}, "gradient scale 3.0 is not allowed"),
        ({"grad_scale": -2.0}, "gradient scale -2.0 is not allowed"),
        ({"grad_scale": math.inf}, "gradient scale inf is not allowed"),
    ],
)
def test_bad_formats_are_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        LinearQuant.from_formats(linear_quant().formats() | change)
    assert "\n" not in str(error.value)


def test_missing_rules_are_named():
    with pytest.raises(ValueError, match="formats lack grad_scale, scale_rule"):
        LinearQuant.from_formats(linear_quant().formats()["fprop"])


def test_what_changes_nothing_is_not_copied():
    x = gradient(dtype=torch.bfloat16)
    assert linear_quant("none").quantize(x, "fprop", "x", axis=1) is x
    assert linear_quant("bf16").quantize(x, "fprop", "x", axis=1) is x
    assert linear_quant("bf16", "bf16", grad_scale="pow2-amax").quantize(x, "dgrad", "dy", axis=1) is x
    assert linear_quant("fp16").quantize(x, "fprop", "x", axis=1) is not x


@pytest.mark.parametrize("scale_rule", ["floor", "rceil"])
def test_operand_is_quantised_along_the_axis_by_the_rule(scale_rule):
    x = gradient(1.0)
    found = linear_quant(scale_rule=scale_rule).quantize(x, "wgrad", "x", axis=0)
    assert torch.equal(found, fake_quantize(x, "mxfp8", axis=0, scale_rule=scale_rule, backend="reference"))


@pytest.mark.parametrize(
    ("amax", "limit", "scale"),
    [
        (1.0, 15.0, 8.0),
        (15.0, 15.0, 1.0),
        (15.000001, 15.0, 0.5),
        (7.5, 15.0, 2.0),
        (1e-6, 65504.0, 2.0**35),
        (2.0**-149, 15.0, 2.0**126),
        (3.4e38, 15.0, 2.0**-125),
        (0.0, 15.0, 1.0),
        (math.inf, 15.0, 1.0),
        (math.nan, 15.0, 1.0),
    ],
)
def test_pow2_scale_is_the_largest_that_fits(amax, limit, scale):
    assert pow2_scale(torch.tensor(amax), limit).item() == scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "limit"), [("hifp8", 15.0), ("fp16", 65504.0)])
def test_pow2_amax_brings_a_gradient_into_range(name, limit, dtype):
    """What comes out is the format on the scaled tensor, to the bit; without the scale nearly all is lost."""
    dy = gradient(2e-7, dtype)
    scale = 2.0 ** math.floor(math.log2(limit / dy.double().abs().max().item()))
    expected = (fake_quantize(dy.double() * scale, name, backend="reference") / scale).to(dtype)
    scaled = linear_quant(backward=name, grad_scale="pow2-amax").quantize(dy, "dgrad", "dy", axis=1)
    assert torch.equal(scaled, expected)
    plain = linear_quant(backward=name).quantize(dy, "dgrad", "dy", axis=1)

    def error(found: torch.Tensor) -> float:
        return ((found - dy).double().norm() / dy.double().norm()).item()

    assert error(scaled) < 0.05
    assert error(scaled) <= 0.2 * error(plain)  # both 0 for fp16 in fp16


def test_fixed_scale_multiplies_and_divides():
    dy = gradient(1e-3)
    found = linear_quant(backward="hifp8", grad_scale=4096.0).quantize(dy, "dgrad", "dy", axis=1)
    assert torch.equal(found, fake_quantize(dy * 4096.0, "hifp8") / 4096.0)


def test_scaling_an_fp16_gradient_neither_overflows_nor_loses_bits():
    """fp16 itself has no room: 100 * 4096 would be Inf, and 0.9375 * 2^-23 would become 2^-23, which HiFloat8 keeps."""
    large = torch.tensor([[100.0]], dtype=torch.float16)
    assert linear_quant(backward="bf16", grad_scale=4096.0).quantize(large, "dgrad", "dy", axis=1).item() == 100.0
    wide = torch.tensor([[1000.0, 0.9375 * 2.0**-16, 0.5 * 2.0**-15]], dtype=torch.float16)
    found = linear_quant(backward="hifp8", grad_scale=2.0**-7).quantize(wide, "dgrad", "dy", axis=1)
    assert found.tolist() == [[1024.0, 0.0, 2.0**-15]]


def test_gradient_scale_leaves_forward_operands_alone():
    x = gradient(1e-6)
    quant = linear_quant("hifp8", "hifp8", grad_scale="pow2-amax")
    assert torch.equal(quant.quantize(x, "fprop", "x", axis=1), fake_quantize(x, "hifp8"))
    assert torch.equal(quant.quantize(x, "wgrad", "x", axis=0), fake_quantize(x, "hifp8"))


@pytest.mark.parametrize("name", ["hifp8", "fp8_e4m3", "nvfp4"])
def test_shards_share_the_amax_of_the_whole(name):
    dy = gradient(1e-4)
    dy[11, 3] = 0.7
    quant = linear_quant("mxfp8", name, grad_scale="pow2-amax" if name == "hifp8" else "none")
    whole = quant.quantize(dy, "dgrad", "dy", axis=1)
    largest = []

    def reduce_amax(amax: torch.Tensor) -> torch.Tensor:
        largest.append(amax.item())
        return torch.tensor(0.7)

    shards = [quant.quantize(part, "dgrad", "dy", axis=1, reduce_amax=reduce_amax) for part in dy.split(6)]
    assert torch.equal(torch.cat(shards), whole)
    assert largest == [part.abs().max().item() for part in dy.split(6)]


def test_block_scaled_operands_need_no_reduction():
    def reduce_amax(amax: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a collective that nobody needs")

    linear_quant().quantize(gradient(), "dgrad", "dy", axis=1, reduce_amax=reduce_amax)


def test_empty_operands_pass():
    for name in ("mxfp8", "hifp8", "nvfp4", "fp8_e4m3"):
        quant = linear_quant(name, name, grad_scale="pow2-amax")
        for gemm, operand in (("fprop", "x"), ("dgrad", "dy")):
            assert quant.quantize(torch.empty(0, 8), gemm, operand, axis=1, reduce_amax=lambda a: a).shape == (0, 8)
