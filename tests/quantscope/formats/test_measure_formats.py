"""`measure_formats`: many formats from one read, held against each by itself; and dead blocks by hand."""

import math
from dataclasses import fields
from itertools import product

import pytest
import torch

from megatron.quantscope.formats import FORMATS, FormatDamage, measure_format, measure_formats
from tests.quantscope.formats.damage_samples import SAMPLES

by_backend = pytest.mark.parametrize("backend", ["cpp", "torch"])
MANY = [(name, rule) for rule in ("floor", "rceil") for name in FORMATS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sample", SAMPLES)
def test_many_formats_are_each_by_itself(sample, dtype, architecture):
    x = SAMPLES[sample](dtype).repeat(1, 33)
    for axis, backend in product((0, 1), ("cpp", "torch")):
        found = measure_formats(x, MANY, axis=axis, backend=backend)
        for (name, rule), damage in zip(MANY, found, strict=True):
            alone = measure_format(x, name, axis=axis, scale_rule=rule, backend="torch")
            assert damage == FormatDamage(**{field.name: getattr(alone, field.name) for field in fields(damage)})


@by_backend
def test_no_format_and_no_element(backend):
    assert measure_formats(torch.ones(3), [], backend=backend) == []
    assert measure_formats(torch.empty(0, 3), MANY, backend=backend) == [FormatDamage()] * len(MANY)
    with pytest.raises(ValueError, match="unknown scale rule 'up'"):
        measure_formats(torch.ones(3), [("mxfp4", "up")], backend=backend)


@by_backend
def test_dead_blocks_by_hand(backend, architecture):
    """HiF8 ends at 2^-22, below half of which there is zero; E8M0 follows amax down to 2^-127."""
    x = torch.zeros(5, 64)
    x[0, 3] = 2.0**-25  # alone in its block
    x[1, 3], x[1, 4] = 2.0**-25, 1.0  # not alone
    x[2, 40], x[2, 41] = math.nan, 2.0**-25  # nor here
    x[3, 5] = -(2.0**-140)
    for name, dead in (("hifp8", 2), ("mxfp8", 1), ("mxfp4", 1), ("bf16", 1), ("fp16", 2)):
        for blocks in (False, True):
            assert measure_format(x, name, blocks=blocks, backend=backend).dead_blocks == dead, name
    nvfp4 = measure_format(x.nan_to_num(), "nvfp4", backend=backend)  # blocks of 16, a scale of E4M3 under that of 1.0
    assert nvfp4.dead_blocks == 3
