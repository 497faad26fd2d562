"""Scales from the counts of the summary table are those that `quantize` gives the blocks."""

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.scales import scale_exponents
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.analysis.tables import summary_row
from megatron.quantscope.capture import TensorRecord
from megatron.quantscope.formats import FORMATS, quantize

MX = [fmt.name for fmt in FORMATS.values() if fmt.scale == "e8m0"]
BIAS, NAN = 127, 255


def row_of(tensor, name="input"):
    record = TensorRecord(
        path="/a", bytes=1, layer_type="linear", operation="forward", quant_type="bf16", tensor_name=name
    )
    return summary_row(record, summarize(tensor, role_of("linear", name), treatments=()))


def stored_scales(x, fmt, rule, axis):
    """Scale exponent -> blocks, of those that are finite and not all zero."""
    scales = quantize(x, fmt, axis=axis, scale_rule=rule).scales
    used = quantize(x.abs(), fmt, axis=axis, scale_rule=rule).scales != NAN
    length = x.shape[axis]
    padded = torch.nn.functional.pad(x.movedim(axis, -1), (0, -length % 32)).unflatten(-1, (-1, 32))
    used &= (padded != 0).any(dim=-1).movedim(-1, axis)
    values, counts = np.unique(scales[used].numpy().astype(int) - BIAS, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def as_dict(histogram):
    places = np.flatnonzero(histogram.counts)
    return {int(place) + histogram.first: int(histogram.counts[place]) for place in places}


def hard(dtype):
    """Blocks of every exponent, at and beside the fractions where rceil changes, with NaN, Inf and zeros among them."""
    fractions = torch.tensor([1.0, 1.25, 1.5, 1.5078125, 1.75, 1.7578125, 1.875, 1.8828125, 1.9921875])
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    amax = (fractions.double() * torch.exp2(exponents)[:, None]).flatten().to(dtype)
    amax = amax[torch.isfinite(amax)]
    x = amax[:, None] * torch.linspace(-1, 0.9, 40, dtype=torch.float64).to(dtype)  # a block of 32 and one of 8
    x[5, 3], x[7, 2], x[9] = float("nan"), float("inf"), 0.0
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", ["floor", "rceil"])
@pytest.mark.parametrize("name", MX)
def test_scales_are_those_of_quantize_along_both_uses(name, rule, dtype):
    x = hard(dtype)
    row = pd.Series(row_of(x))
    assert as_dict(scale_exponents(row, name, rule)) == stored_scales(x, name, rule, 1)
    assert as_dict(scale_exponents(row, name, rule, use=1)) == stored_scales(x, name, rule, 0)


def test_any_float32_fraction():
    """But for the one number that the module's docstring names, next above max * 2^-127."""
    x = torch.randint(0, 0x7F800000, (1 << 14, 1), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x = x.view(torch.float32)
    for name in MX:
        limit = torch.tensor(FORMATS[name].max)
        x[: 2 * 250 : 2, 0] = limit * torch.exp2(torch.arange(-140.0, 110.0))
        x[1 : 2 * 250 : 2, 0] = x[: 2 * 250 : 2, 0].nextafter(torch.tensor(torch.inf))
        x[x == (limit * 2.0**-127).nextafter(limit)] = 1.0
        found = scale_exponents(pd.Series(row_of(x)), name, "rceil")
        assert as_dict(found) == stored_scales(x, name, "rceil", 1), name


def test_rows_add_up_and_those_without_a_second_use_count_for_nothing():
    generator = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(64, 64, generator=generator) * 10.0**power).bfloat16() for power in (-3, 0, 3)]
    frame = pd.DataFrame([row_of(x, name) for x, name in zip(tensors, ("input", "output", "weight"), strict=True)])
    for rule in ("floor", "rceil"):
        expected = stored_scales(torch.cat(tensors), "mxfp4", rule, 1)
        assert as_dict(scale_exponents(frame, "mxfp4", rule)) == expected
        expected = stored_scales(torch.cat([tensors[0], tensors[2]], 1), "mxfp4", rule, 0)
        assert as_dict(scale_exponents(frame, "mxfp4", rule, use=1)) == expected
    assert scale_exponents(frame[:0], "mxfp4").total == 0
    assert scale_exponents(frame[1:2], "mxfp4", use=1).total == 0


def test_formats_without_such_scales_are_refused():
    for name in ("nvfp4", "hifp8"):
        with pytest.raises(ValueError, match=f"{name} has no E8M0 scales"):
            scale_exponents(pd.Series(row_of(torch.ones(2, 2))), name)
