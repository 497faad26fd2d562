"""Codes and scales: what `quantize` and `dequantize` refuse, in one line each."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron.quantscope.formats import dequantize, quantize

CODES, SCALES = torch.zeros(2, 64, dtype=torch.uint8), torch.full((2, 2), 127, dtype=torch.uint8)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "the reference": (
        partial(quantize, torch.ones(2, 32), "mxfp8", backend="reference"),
        ValueError,
        "backend 'reference' makes no codes: choose auto, cpp, triton or torch",
    ),
    "an unknown backend": (partial(quantize, torch.ones(2), "mxfp8", backend="cuda"), ValueError, "unknown backend"),
    "integers": (partial(quantize, torch.ones(2).int(), "mxfp8"), TypeError, "a tensor of torch.int32 can not be"),
    "an axis of x": (partial(quantize, torch.ones(2), "mxfp8", axis=1), ValueError, "axis 1 is not allowed for 1 dim"),
    "a rule": (partial(quantize, torch.ones(2), "mxfp8", scale_rule="up"), ValueError, "unknown scale rule 'up'"),
    "no overflow": (partial(quantize, torch.ones(2), "mxfp4", saturate=False), ValueError, "saturate=False is not"),
    "a format": (partial(dequantize, CODES, "fp3"), ValueError, "unknown number format 'fp3'"),
    "codes of int32": (
        partial(dequantize, CODES.int(), "mxfp8", scales=SCALES),
        TypeError,
        "codes of mxfp8 are torch.uint8, not torch.int32",
    ),
    "codes of uint8": (
        partial(dequantize, CODES, "bf16"),
        TypeError,
        "codes of bf16 are torch.uint16, not torch.uint8",
    ),
    "a result of int32": (
        partial(dequantize, CODES, "hifp8", dtype=torch.int32),
        TypeError,
        "codes can not be made torch.int32: choose from torch.bfloat16, torch.float16, torch.float32, torch.float64",
    ),
    "no scales": (partial(dequantize, CODES, "mxfp8"), ValueError, "codes of mxfp8 need scales$"),
    "no scale": (partial(dequantize, CODES, "fp8_e4m3"), ValueError, "codes of fp8_e4m3 need scales$"),
    "no tensor scale": (
        partial(dequantize, CODES, "nvfp4", scales=SCALES),
        ValueError,
        "codes of nvfp4 need scales and tensor_scale",
    ),
    "scales of float32": (
        partial(dequantize, CODES, "mxfp8", scales=SCALES.float()),
        TypeError,
        "scales of mxfp8 are torch.uint8, not torch.float32",
    ),
    "a scale of uint8": (
        partial(dequantize, CODES, "fp8_e5m2", scales=SCALES),
        TypeError,
        "scales of fp8_e5m2 are torch.float32, not torch.uint8",
    ),
    "too many scales": (
        partial(dequantize, CODES, "mxfp8", scales=torch.cat([SCALES, SCALES], dim=1)),
        ValueError,
        r"scales of shape \[2, 4\] do not go with codes of \[2, 64\]: \[2, 2\] do",
    ),
    "scales of another axis": (
        partial(dequantize, CODES, "mxfp8", scales=SCALES, axis=0),
        ValueError,
        r"scales of shape \[2, 2\] do not go with codes of \[2, 64\]: \[1, 64\] do",
    ),
    "an axis of codes": (
        partial(dequantize, CODES, "mxfp8", scales=SCALES, axis=2),
        ValueError,
        "axis 2 is not allowed",
    ),
    "a length": (
        partial(dequantize, CODES, "mxfp4", scales=SCALES, length=126),
        ValueError,
        "length 126 does not go with 64 bytes: give 127 or 128",
    ),
}
ALSO_BAD = {
    "a scale of wrong shape": partial(dequantize, CODES, "fp8_e4m3", scales=torch.ones(3)),
    "a scale an element": partial(dequantize, CODES, "fp8_e4m3", scales=torch.ones(64)),
    "a tensor scale of wrong shape": partial(
        dequantize, CODES, "nvfp4", scales=torch.zeros(2, 8, dtype=torch.uint8), tensor_scale=torch.ones(8)
    ),
    "a tensor scale of wrong dtype": partial(
        dequantize, CODES, "nvfp4", scales=torch.zeros(2, 8, dtype=torch.uint8), tensor_scale=torch.ones((), dtype=int)
    ),
    "codes of more bits than the format has": partial(dequantize, CODES + 64, "mxfp6_e2m3", scales=SCALES),
    "a length that is not that of the codes": partial(dequantize, CODES, "mxfp8", scales=SCALES, length=63),
    "codes without dimensions": partial(dequantize, CODES[0, 0], "mxfp8", scales=SCALES[0, 0]),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_named_in_one_line(what):
    call, kind, message = BAD[what]
    with pytest.raises(kind, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ALSO_BAD)
def test_what_is_wrong_is_noticed(what):
    with pytest.raises((TypeError, ValueError)):
        ALSO_BAD[what]()
