import math
import subprocess
import sys

import numpy as np
import pytest

from megatron.quantscope.flags.quantization import QUANT_TYPES, UNQUANTIZED
from megatron.quantscope.formats import ALIASES, FORMATS, catalog, get_format
from megatron.quantscope.formats.records import exponent_of
from megatron.quantscope.formats.reference import element_grid

PLAIN = [fmt for fmt in FORMATS.values() if not fmt.is_tapered]


def test_names_are_those_of_the_flag():
    assert {*FORMATS, *ALIASES} == set(QUANT_TYPES) - {UNQUANTIZED}


def test_alias_gives_the_record_it_stands_for():
    assert get_format("mxfp8_e4m3") is FORMATS["mxfp8"]


def test_unknown_name_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"unknown number format 'fp7'.*mxfp8.*hifp8") as error:
        get_format("fp7")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fmt", PLAIN, ids=lambda fmt: fmt.name)
def test_limits_follow_from_the_fields(fmt):
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits
    assert fmt.min_normal == 2.0 ** (1 - fmt.bias)
    assert fmt.min_subnormal == 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
    assert (fmt.emin, fmt.emax) == (1 - fmt.bias, math.floor(math.log2(fmt.max)))


def test_hif8_is_its_code_table(golden):
    values = golden("hif8_decode")["values"]
    finite = sorted(value for value in values.tolist() if math.isfinite(value) and value >= 0)
    hif8 = FORMATS["hifp8"]
    assert element_grid(hif8) == finite
    assert (hif8.max, hif8.min_subnormal) == (finite[-1], finite[1])
    assert hif8.has_inf == bool(np.isinf(values).any())
    assert hif8.has_nan == bool(np.isnan(values).any())
    assert hif8.has_negative_zero == bool(((values == 0) & np.signbit(values)).any())


def test_hif8_precision_tapers():
    hif8 = FORMATS["hifp8"]
    bits = {exponent: hif8.mantissa_bits_at(exponent) for exponent in range(-22, 16)}
    assert [sum(1 for m in bits.values() if m == wanted) for wanted in (3, 2, 1, 0)] == [7, 8, 16, 7]
    assert hif8.full_precision_max == 15.0
    for outside in (-23, 16):
        with pytest.raises(ValueError, match="no normal values"):
            hif8.mantissa_bits_at(outside)


def test_precision_of_a_plain_format_is_one_number():
    assert {FORMATS["mxfp8"].mantissa_bits_at(exponent) for exponent in range(-6, 9)} == {3}
    assert FORMATS["mxfp8"].full_precision_max == 448.0


@pytest.mark.parametrize(("value", "exponent"), [(1.0, 0), (0.75, -1), (-448.0, 8), (5e-324, -1074), (2.0**1023, 1023)])
def test_exponent_of_is_exact(value, exponent):
    assert exponent_of(value) == exponent


def test_scaled_formats_differ_from_their_element_in_the_scale_only():
    scales = {name: (fmt.element, fmt.block, fmt.scale) for name, fmt in FORMATS.items() if fmt.scale}
    assert scales == {
        "mxfp8": ("e4m3", 32, "e8m0"),
        "mxfp8_e5m2": ("e5m2", 32, "e8m0"),
        "mxfp6_e2m3": ("e2m3", 32, "e8m0"),
        "mxfp6_e3m2": ("e3m2", 32, "e8m0"),
        "mxfp4": ("e2m1", 32, "e8m0"),
        "nvfp4": ("e2m1", 16, "e4m3+fp32"),
        "fp8_e4m3": ("e4m3", None, "fp32"),
        "fp8_e5m2": ("e5m2", None, "fp32"),
    }
    assert FORMATS["nvfp4"].max == catalog.E2M1.max


def test_reading_the_records_does_not_import_torch():
    code = (
        "import sys, megatron.quantscope.formats as f; f.get_format('mxfp8');"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "f.fake_quantize; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute_of_the_package_is_an_attribute_error():
    import megatron.quantscope.formats as formats

    with pytest.raises(AttributeError, match="no attribute 'quantise_twice'"):
        _ = formats.quantise_twice
