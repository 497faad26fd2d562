"""Which records the C++ kernels take, what they make of other formats than ours, and how the two languages meet."""

import ctypes
import subprocess
from dataclasses import replace

import pytest
import torch

from megatron.quantscope.formats import (
    FORMATS,
    Band,
    catalog,
    cpp_backend,
    cpp_build,
    cpp_measure,
    fake_quantize,
    fake_quantize_both,
)
from megatron.quantscope.formats.backends import BACKENDS

OTHER_BLOCKS = [replace(FORMATS["mxfp8"], name=f"mxfp8_by_{block}", block=block) for block in (16, 48, 64)]
TAPERED = [
    replace(FORMATS["hifp8"], name=f"by_{bits}", mantissa_bits=bits, bands=(Band(3, bits), Band(9, 2), Band(22, 0)))
    for bits in (3, 6, 7, 8)
]
BEYOND_THE_KERNELS = {
    "a block that is no whole number of vectors": replace(FORMATS["mxfp8"], name="custom", block=24),
    "a block larger than the buffers": replace(FORMATS["mxfp8"], name="custom", block=128),
    "tapering with ties to even": replace(FORMATS["hifp8"], name="custom", rounding="half_even"),
    "no -0": replace(catalog.E4M3, name="custom", has_negative_zero=False),
    "tapering under a scale": replace(FORMATS["hifp8"], name="custom", block=32, scale="e8m0"),
    "too many bands": replace(FORMATS["hifp8"], name="custom", bands=tuple(Band(n, 3 - n // 6) for n in range(1, 23))),
    "float32's exponents under a scale": replace(FORMATS["bf16"], name="custom", torch_dtype=None, scale="fp32"),
}
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
has_compiler = pytest.mark.skipif(BACKENDS["cpp"].lacks() is not None, reason="no C++ kernels here")


def sample(*shape: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=numbers)
    return x * torch.exp2(4 * torch.randn(x.shape[:-1], generator=numbers)).unsqueeze(-1)


@has_compiler
@by_dtype
@pytest.mark.parametrize("fmt", OTHER_BLOCKS, ids=lambda fmt: fmt.name)
def test_other_blocks(fmt, dtype, assert_same_bits):
    assert cpp_backend.can_run(fmt)
    x = sample(192, 288).to(dtype)
    expected = [fake_quantize(x, fmt, axis=axis, backend="torch") for axis in (0, 1)]
    for axis in (0, 1):
        assert_same_bits(fake_quantize(x, fmt, axis=axis, backend="cpp"), expected[axis])
    along_row, down_column = fake_quantize_both(x, fmt, backend="cpp")
    assert_same_bits(down_column, expected[0])
    assert_same_bits(along_row, expected[1])


@has_compiler
@by_dtype
@pytest.mark.parametrize("fmt", TAPERED, ids=lambda fmt: fmt.name)
def test_other_tapered_formats(fmt, dtype, assert_same_bits):
    x = sample(4000).to(dtype)
    assert_same_bits(fake_quantize(x, fmt), fake_quantize(x, fmt, backend="reference"))


@pytest.mark.parametrize("what", BEYOND_THE_KERNELS)
def test_what_the_kernels_can_not_do_is_left_to_others(what, assert_same_bits):
    fmt = BEYOND_THE_KERNELS[what]
    assert not cpp_backend.can_run(fmt)
    x = sample(6, 100)
    assert_same_bits(fake_quantize(x, fmt), fake_quantize(x, fmt, backend="reference"))


@has_compiler
@pytest.mark.parametrize("what", BEYOND_THE_KERNELS)
def test_by_name_the_kernels_refuse_what_they_can_not_do(what):
    message = r"^backend 'cpp' does not take torch.float32 on cpu in custom: CPU tensors of a built-in format$"
    with pytest.raises(ValueError, match=message):
        fake_quantize(sample(6, 100), BEYOND_THE_KERNELS[what], backend="cpp")


def test_the_kernels_can_do_all_formats():
    elements = (catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1)
    assert all(cpp_backend.can_run(fmt) for fmt in (*FORMATS.values(), *elements))


@has_compiler
@pytest.mark.parametrize(
    ("structure", "header"),
    [
        (cpp_backend.Rule, "rule.h"),
        (cpp_backend.Call, "tensors.h"),
        (cpp_measure.Summary, "totals.h"),
        (cpp_measure.Damage, "errors.h"),
    ],
)
def test_structures_lie_in_memory_as_those_of_the_sources(structure, header, tmp_path):
    """The compiler is asked; an assertion that is false shows that it answers."""

    def agrees(size: int) -> bool:
        checks = [f"sizeof({structure.__name__}) == {size}"]
        for name, _ in structure._fields_:
            field = getattr(structure, name)
            checks.append(f"offsetof({structure.__name__}, {name}) == {field.offset}")
            checks.append(f"sizeof({structure.__name__}::{name}) == {field.size}")
        asserts = "\n".join(f'static_assert({check}, "");' for check in checks)
        source = tmp_path / "check.cc"
        source.write_text(f'#include <cstddef>\n#include "{cpp_build.SOURCES / header}"\n{asserts}\n')
        command = [*cpp_build._compiler(), "-std=c++17", "-fsyntax-only", str(source)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    size = ctypes.sizeof(structure)
    assert agrees(size)
    assert not agrees(size + 8)
