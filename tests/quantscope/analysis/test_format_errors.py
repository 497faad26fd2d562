import math

import pytest

from megatron.quantscope.analysis.format_errors import FormatError, treatments
from megatron.quantscope.formats import FORMATS


def test_sqnr_is_defined_for_every_case():
    assert FormatError(error_squares=1.0).sqnr_db(1000.0) == pytest.approx(30.0)
    assert FormatError().sqnr_db(5.0) == math.inf
    assert FormatError(lost=1).sqnr_db(5.0) == -math.inf
    assert math.isnan(FormatError().sqnr_db(0.0))


def test_records_add_up():
    total = FormatError(error_squares=1.0, underflow=2) + FormatError(error_squares=0.5, saturated=3, lost=4)
    assert total == FormatError(error_squares=1.5, underflow=2, saturated=3, lost=4)


def test_every_format_is_tried_but_nvfp4_which_only_its_own_captures_need():
    names = {one.name for one in treatments()}
    assert names == set(FORMATS) - {"nvfp4"} | {"fp16_pow2", "hifp8_pow2"}
    assert {one.name for one in treatments(["nvfp4", "bf16"])} == names | {"nvfp4"}
    assert {one.name for one in treatments(["mxfp8_e4m3", "something else"])} == names
