import resource
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.format_errors import FormatError, Treatment, pow2_scale, treatments
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.formats import FORMATS, fake_quantize, measure
from megatron.quantscope.formats.backends import BACKENDS
from megatron.quantscope.formats.scales import as_float32
from tests.quantscope.analysis.conftest import numpy_error

TREATMENTS = treatments()
X, W, Y, DY = (role_of("linear", name) for name in ("input", "weight", "output", "grad_output"))
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def dead_blocks(x, q, axis, block):
    rows = [np.moveaxis(tensor.double().numpy(), axis, -1) for tensor in (x, q)]
    padded = [np.pad(part.reshape(-1, part.shape[-1]), ((0, 0), (0, -part.shape[-1] % block))) for part in rows]
    before, after = ((part.reshape(-1, block) != 0).any(axis=1) for part in padded)
    return int((before & ~after).sum())


def check(x, role, head_dim=None):
    """Every treatment of every use, against numpy in float64 on what `fake_quantize` makes of the operand."""
    summary = summarize(x, role, treatments=TREATMENTS, head_dim=head_dim)
    for treatment in TREATMENTS:
        if treatment.use >= len(role.cuts):
            assert treatment.name not in summary.errors
            continue
        found = summary.errors[treatment.name]
        if treatment.record.is_identity_for(x.dtype):
            assert found == FormatError()
            continue
        view, axis = role.cuts[treatment.use].view(x, head_dim)
        wide, scale = as_float32(view), 1.0
        if treatment.scaled and bool(torch.isfinite(wide).all()):
            scale = pow2_scale(float(wide.abs().max()), treatment.record.full_precision_max)
        q = fake_quantize(wide.double() * scale, treatment.format, axis=axis, scale_rule=treatment.scale_rule) / scale
        squares, underflow, lost = numpy_error(wide, q)
        assert (found.underflow, found.lost) == (underflow, lost), treatment.name
        assert found.error_squares == pytest.approx(squares, rel=1e-9), treatment.name
        assert found.dead_blocks == dead_blocks(wide, q, axis, treatment.record.block or 32), treatment.name
        if not lost and squares:
            finite = x.double().numpy()[np.isfinite(x.double().numpy())]
            expected = 10 * np.log10(np.square(finite).sum() / squares)
            assert found.sqnr_db(summary.statistics.sum_squares) == pytest.approx(expected, rel=1e-9), treatment.name
    return summary


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("role", [X, W, Y, DY], ids=lambda role: role.symbol)
def test_errors_equal_numpy_in_float64(rough, dtype, role):
    check(rough.clamp(-1000, 1000).to(dtype), role)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("role", [W, DY], ids=lambda role: role.symbol)
def test_adversarial_values(role, dtype):
    """Subnormals, both zeros, the largest numbers, NaN and Inf; in blocks of their own, mixed, and in short blocks."""
    x = torch.randn(70, 45, generator=torch.Generator().manual_seed(0))
    x[0], x[1, ::2] = 2.0**-133, 2.0**-128
    x[2], x[3, ::3] = 2.0**127, -(2.0**127)
    x[4], x[5, ::2] = 0.0, -0.0
    x[33:64, 7] = 0.0
    check(x.to(dtype), role)
    x[6, 3], x[7, 40], x[8, 44] = float("nan"), float("inf"), -float("inf")
    summary = check(x.to(dtype), role)
    assert summary.statistics == measure(x.to(dtype))
    assert summary.errors["mxfp8"].lost > 0


CUT = [
    ("linear", "input", (20, 2, 33)), ("linear", "grad_output", (20, 2, 33)), ("attention", "value", (40, 2, 3, 24)),
    ("attention", "grad_output", (40, 2, 96)), ("attention", "attention_probs", (2, 3, 40, 40)),
]  # fmt: skip


@pytest.mark.parametrize(("layer_type", "name", "shape"), CUT)
def test_operands_are_cut_as_their_gemms_cut_them(layer_type, name, shape):
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=numbers) * torch.exp2(4 * torch.randn(shape, generator=numbers))
    check(x.bfloat16(), role_of(layer_type, name), head_dim=24)


def test_blocks_run_along_each_use():
    x = torch.logspace(-4, 4, 64)[:, None, None] * torch.randn(64, 2, 48, generator=torch.Generator().manual_seed(0))
    summary = summarize(x.bfloat16(), X, treatments=TREATMENTS)
    assert [blocks.total for blocks in summary.blocks] == [64 * 2 * 2, 4 * 48]
    assert summary.errors["mxfp4"].error_squares < summary.errors["mxfp4@2"].error_squares
    assert summary.blocks[0].depths.sum() == x.numel()
    assert summary.blocks[1].depths is None


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_without_a_compiler_the_numbers_are_the_same(rough, dtype, monkeypatch):
    x = rough.clamp(-6e4, 6e4).to(dtype)
    x[6, 1] = float("nan")
    found = summarize(x, W, treatments=TREATMENTS)
    monkeypatch.setitem(BACKENDS, "cpp", replace(BACKENDS["cpp"], lacks=lambda: "no compiler"))
    plain = summarize(x, W, treatments=TREATMENTS)
    assert plain.errors == found.errors
    assert plain.statistics == found.statistics
    assert plain.distribution == found.distribution
    np.testing.assert_array_equal(plain.channel_amax, found.channel_amax)
    for a, b in zip(plain.blocks, found.blocks, strict=True):
        assert (a.total, a.zero, a.first) == (b.total, b.zero, b.first)
        np.testing.assert_array_equal(a.amax, b.amax)
        np.testing.assert_array_equal(a.depths, b.depths)


@pytest.mark.parametrize(("layer_type", "name", "shape"), [*CUT, ("linear", "weight", (100, 33)), ("", "", (70,))])
def test_scaled_treatments_are_the_same_in_parts(layer_type, name, shape, monkeypatch):
    """Of less than a row, of some rows, and of more than there are."""
    numbers = torch.Generator().manual_seed(0)
    x = 1e-6 * torch.randn(shape, generator=numbers) * torch.exp2(8 * torch.randn(shape, generator=numbers))
    x.view(-1)[:40] *= 2.0**-60
    tried = [treatment for treatment in TREATMENTS if treatment.scaled]
    found = []
    for part in (1, 150, 1 << 20):
        monkeypatch.setattr("megatron.quantscope.analysis.summary._PART", part)
        found.append(summarize(x, role_of(layer_type, name), treatments=tried, head_dim=24).errors)
    assert found[0] == found[1] == found[2]
    assert all(error.underflow for error in found[0].values())
    if layer_type != "attention" and "input" not in name:  # whose rows of 33 end a block among the first 40
        assert all(error.dead_blocks for error in found[0].values())


def error_of(name, *values):
    treatment = Treatment(name)
    return summarize(torch.tensor([values]), Y, treatments=[treatment]).errors[name]


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS.values() if not fmt.has_tensor_scale])
def test_limits_are_those_of_the_records(name):
    """Max stays as it is, and in a block makes the scale 1; half of the smallest value is where underflow begins."""
    fmt = FORMATS[name]
    assert error_of(name, fmt.max, fmt.min_normal, fmt.min_subnormal) == FormatError()
    tie = fmt.min_subnormal / 2
    assert error_of(name, fmt.max, tie).underflow == (fmt.rounding == "half_even")
    assert error_of(name, fmt.max, torch.tensor(tie).nextafter(torch.tensor(1.0)).item()).underflow == 0
    assert error_of(name, fmt.max, torch.tensor(tie).nextafter(torch.tensor(0.0)).item()).underflow == 1


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp8_e5m2", "hifp8", "fp16"])
def test_what_lies_beyond_max_saturates_or_is_lost(name):
    fmt = FORMATS[name]
    beyond = error_of(name, (fmt.max + 2.0 ** (fmt.emax + 1)) / 2 if fmt.block else 1.3 * fmt.max)
    assert (beyond.saturated, beyond.lost) == ((1, 0) if fmt.overflow == "saturate" else (0, 1))
    if fmt.block:
        assert beyond.error_squares == ((2.0 ** (fmt.emax + 1) - fmt.max) / 2) ** 2


def test_integers_are_taken_as_the_values_they_are():
    x = torch.tensor([[-128, 3], [5, -7]], dtype=torch.int8)
    summary = summarize(x, X, treatments=TREATMENTS)
    assert (summary.channel_amax.tolist(), summary.distribution.top) == ([128.0, 7.0], (128.0, 7.0, 5.0))
    assert summary.distribution.median_magnitude == 5.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_are_measured_and_not_quantised(dtype):
    x = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    summary = summarize(x, X, treatments=TREATMENTS)
    assert (summary.statistics.count, summary.statistics.zero, summary.distribution.top) == (4, 1, (1.0, 1.0, 1.0))
    assert summary.errors == {}
    assert summary.blocks == ()


def test_fp8_tensors_are_taken_as_the_values_they_are():
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    summary = summarize(x, X, treatments=TREATMENTS)
    assert summary.statistics.amax == x.float().abs().max().item()
    assert summary.errors["bf16"].error_squares == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_small_shapes(shape):
    summary = summarize(torch.ones(shape, dtype=torch.bfloat16), W, treatments=TREATMENTS)
    assert summary.statistics.count == int(np.prod(shape))
    assert all(error.error_squares == 0 for name, error in summary.errors.items() if name != "nvfp4")


def test_a_dtype_without_real_values_is_refused():
    with pytest.raises(TypeError, match="complex"):
        summarize(torch.ones(2, dtype=torch.complex64), X, treatments=TREATMENTS)


MEMORY_PROGRAM = """
import resource, torch
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.summary import summarize
torch.set_num_threads(1)
summarize(torch.randn(64, 64).bfloat16(), role_of("linear", "weight"), treatments=treatments())
x = torch.full((4096, 8192), 1.5, dtype=DTYPE)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
summarize(x, role_of("linear", "weight"), treatments=treatments())
x[7, 11] = float("nan")
summarize(x, role_of("linear", "weight"), treatments=treatments())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_beside_a_large_tensor_is_bounded(dtype):
    """64 MiB of bf16, 128 of float32: no copy of it, and buffers that do not grow with it."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 30  # kilobytes, as the program below counts
    program = MEMORY_PROGRAM.replace("DTYPE", str(dtype))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50 * 1024
