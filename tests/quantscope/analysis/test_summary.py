import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.formats import FORMATS, fake_quantize, measure
from megatron.quantscope.formats.scales import as_float32
from tests.quantscope.analysis.conftest import numpy_error

TREATMENTS = treatments(["nvfp4"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sqnr_of_every_format_equals_numpy_in_float64(rough, dtype):
    x = rough[:, :64].clamp(-1000, 1000).to(dtype)
    summary = summarize(x, axis=-1, treatments=TREATMENTS)
    signal = float(np.square(x.double().numpy()).sum())
    for fmt in FORMATS.values():
        squares, underflow, lost = numpy_error(x, fake_quantize(as_float32(x), fmt))
        found = summary.errors[fmt.name]
        assert (found.underflow, found.lost) == (underflow, lost), fmt.name
        expected = np.inf if squares == 0 else 10 * np.log10(signal / squares)
        assert found.sqnr_db(summary.statistics.sum_squares) == pytest.approx(expected, rel=1e-9), fmt.name


def test_blocks_run_along_the_given_axis():
    x = (
        torch.randn(64, 2, 3, 16, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-4, 4, 64)[:, None, None, None]
    )
    x = x.bfloat16()
    fmt = FORMATS["mxfp4"]
    by_axis = {axis: summarize(x, axis=axis, treatments=TREATMENTS).errors["mxfp4"].error_squares for axis in (0, -1)}
    for axis, found in by_axis.items():
        assert found == pytest.approx(numpy_error(x, fake_quantize(x, fmt, axis=axis))[0], rel=1e-12)
    assert by_axis[0] != by_axis[-1]


def test_statistics_are_those_of_formats(rough):
    x = rough.bfloat16()
    assert summarize(x, axis=-1, treatments=TREATMENTS).statistics == measure(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_are_measured_and_not_quantised(dtype):
    x = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    summary = summarize(x, axis=-1, treatments=TREATMENTS)
    assert (summary.statistics.count, summary.statistics.zero, summary.distribution.top) == (4, 1, (1.0, 1.0, 1.0))
    assert summary.errors == {}
    assert summary.blocks is None


def test_fp8_tensors_are_taken_as_the_values_they_are():
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    summary = summarize(x, axis=-1, treatments=TREATMENTS)
    assert summary.statistics.amax == x.float().abs().max().item()
    assert summary.errors["bf16"].error_squares == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_small_shapes(shape):
    summary = summarize(torch.ones(shape, dtype=torch.bfloat16), axis=0, treatments=TREATMENTS)
    assert summary.statistics.count == int(np.prod(shape))
    assert all(error.error_squares == 0 for name, error in summary.errors.items() if name != "nvfp4")


def test_a_dtype_without_real_values_is_refused():
    with pytest.raises(TypeError, match="complex"):
        summarize(torch.ones(2, dtype=torch.complex64), axis=-1, treatments=TREATMENTS)


MEMORY_PROGRAM = """
import resource, torch
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.summary import summarize
torch.set_num_threads(1)
summarize(torch.randn(64, 64).bfloat16(), axis=-1, treatments=treatments())
x = torch.full((4096, 8192), 1.5, dtype=torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
summarize(x, axis=-1, treatments=treatments())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_beside_a_large_tensor_is_bounded():
    """64 MiB of bf16: at most one copy of it, and buffers that do not grow with it."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 30  # kilobytes, as the program below counts
    done = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150 * 1024
