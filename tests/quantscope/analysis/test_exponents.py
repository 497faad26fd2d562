import math

import numpy as np
import pytest

from megatron.quantscope.analysis.blocks import DEPTHS
from megatron.quantscope.analysis.exponents import ExponentHistogram, added, precision_bands, scaled_into_blocks, spans
from megatron.quantscope.formats import FORMATS, fake_quantize


def test_histogram_sums_to_its_elements():
    histogram = ExponentHistogram.of({-3: 5, 2: 7, 0: 0, -1: 1})
    assert (histogram.first, histogram.counts.tolist(), histogram.total) == (-3, [5, 0, 1, 0, 0, 7], 13)
    assert histogram.edges.tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert ExponentHistogram.of({}).total == 0


def test_adding_histograms_adds_their_bins():
    one, two = ExponentHistogram.of({-3: 5, 2: 7}), ExponentHistogram.of({1: 1, 2: 2, 9: 3})
    total = added([one, ExponentHistogram.of({}), two])
    assert total.total == one.total + two.total
    assert total.count_of(2, 3) == 9
    assert total.count_of(-100, 100) == 18
    assert added([]).total == 0


def test_width_that_holds_a_share():
    assert ExponentHistogram(0, np.array([1, 998, 1])).width_of(0.99) == 1
    assert ExponentHistogram(0, np.array([250, 250, 250, 250])).width_of(0.99) == 4


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_spans_are_the_limits_of_the_record_without_gaps(fmt):
    underflow, subnormal, normal, overflow = spans(fmt)
    assert underflow.lower == -math.inf
    assert overflow.upper == math.inf
    assert 2.0**underflow.upper == fmt.min_subnormal / 2
    assert 2.0**subnormal.upper == fmt.min_normal
    assert 2.0**normal.upper == pytest.approx(fmt.max, rel=1e-15)
    assert [one.upper for one in (underflow, subnormal, normal)] == [one.lower for one in (subnormal, normal, overflow)]


@pytest.mark.parametrize("name", ["hifp8", "fp16", "bf16"])
def test_span_edges_are_where_quantising_changes_its_mind(name):
    import torch

    fmt = FORMATS[name]
    underflow, _, _, overflow = spans(fmt)
    inside = torch.tensor([2.0**underflow.upper * 0.99, 2.0**underflow.upper * 1.01], dtype=torch.float64)
    assert fake_quantize(inside, fmt).tolist() == [0.0, fmt.min_subnormal]
    largest = torch.tensor([2.0**overflow.lower], dtype=torch.float64)
    assert fake_quantize(largest, fmt).item() == pytest.approx(fmt.max)


def test_precision_bands_of_hif8_are_its_dot_table():
    assert [(band.lower, band.upper, band.mantissa_bits) for band in precision_bands(FORMATS["hifp8"])] == [
        (-math.inf, -23, None),
        (-23, -15, 0),
        (-15, -7, 1),
        (-7, -3, 2),
        (-3, 4, 3),
        (4, 8, 2),
        (8, 15, 1),
        (15, math.inf, None),
    ]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_precision_bands_have_no_gaps(fmt):
    bands = precision_bands(fmt)
    assert [band.upper for band in bands[:-1]] == [band.lower for band in bands[1:]]
    assert max(band.mantissa_bits or 0 for band in bands) == fmt.mantissa_bits


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp8_e5m2"])
def test_block_amax_lands_in_the_binade_of_max(name):
    fmt = FORMATS[name]
    depths = np.zeros(DEPTHS, dtype=np.int64)
    depths[0], depths[3], depths[-1] = 10, 5, 2
    histogram = scaled_into_blocks(depths, fmt)
    assert histogram.total == 17
    assert histogram.count_of(fmt.emax, fmt.emax + 1) == 10
    assert histogram.count_of(fmt.emax - 3, fmt.emax - 2) == 5
    assert histogram.first == fmt.emax - DEPTHS + 1
