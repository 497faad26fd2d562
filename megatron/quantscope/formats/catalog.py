"""The formats themselves: elements first, then the scaled formats that are made of them.

Sources
    IEEE754  IEEE 754-2019, binary16; bfloat16 is the upper half of binary32.
    OCP-FP8  OCP 8-bit Floating Point Specification (OFP8) 1.0.
    OCP-MX   OCP Microscaling Formats (MX) Specification 1.0: elements of 5.3, conversion of 6.3.
    HIF8     Luo et al., "Ascend HiFloat8 Format for Deep Learning", arXiv:2409.16626.
    TE       NVIDIA TransformerEngine, current scaling and NVFP4 recipes: the order of its float32 operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron.quantscope.formats.records import Band, Format

BF16 = Format(
    name="bf16",
    title="BF16",
    element="bf16",
    bits=16,
    exponent_bits=8,
    mantissa_bits=7,
    bias=127,
    max=(2.0 - 2.0**-7) * 2.0**127,
    min_normal=2.0**-126,
    min_subnormal=2.0**-133,
    rounding="half_even",
    overflow="infinity",
    has_inf=True,
    has_nan=True,
    torch_dtype="bfloat16",
    source="IEEE754",
)
FP16 = Format(
    name="fp16",
    title="FP16",
    element="fp16",
    bits=16,
    exponent_bits=5,
    mantissa_bits=10,
    bias=15,
    max=65504.0,
    min_normal=2.0**-14,
    min_subnormal=2.0**-24,
    rounding="half_even",
    overflow="infinity",
    has_inf=True,
    has_nan=True,
    torch_dtype="float16",
    source="IEEE754",
)
HIFP8 = Format(
    name="hifp8",
    title="HiF8",
    element="hif8",
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=0,
    max=2.0**15,
    min_normal=2.0**-15,
    min_subnormal=2.0**-22,
    rounding="half_away",
    overflow="infinity",
    has_inf=True,
    has_nan=True,
    has_negative_zero=False,
    bands=(Band(limit=3, mantissa_bits=3), Band(7, 2), Band(15, 1), Band(22, 0)),
    source="HIF8",
)
E4M3 = Format(
    name="e4m3",
    title="E4M3",
    element="e4m3",
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max=448.0,
    min_normal=2.0**-6,
    min_subnormal=2.0**-9,
    rounding="half_even",
    overflow="saturate",
    has_inf=False,
    has_nan=True,
    source="OCP-FP8",
)
E5M2 = Format(
    name="e5m2",
    title="E5M2",
    element="e5m2",
    bits=8,
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max=57344.0,
    min_normal=2.0**-14,
    min_subnormal=2.0**-16,
    rounding="half_even",
    overflow="saturate",
    has_inf=True,
    has_nan=True,
    source="OCP-FP8",
)
E2M3 = Format(
    name="e2m3",
    title="E2M3",
    element="e2m3",
    bits=6,
    exponent_bits=2,
    mantissa_bits=3,
    bias=1,
    max=7.5,
    min_normal=1.0,
    min_subnormal=2.0**-3,
    rounding="half_even",
    overflow="saturate",
    has_inf=False,
    has_nan=False,
    source="OCP-MX",
)
E3M2 = Format(
    name="e3m2",
    title="E3M2",
    element="e3m2",
    bits=6,
    exponent_bits=3,
    mantissa_bits=2,
    bias=3,
    max=28.0,
    min_normal=2.0**-2,
    min_subnormal=2.0**-4,
    rounding="half_even",
    overflow="saturate",
    has_inf=False,
    has_nan=False,
    source="OCP-MX",
)
E2M1 = Format(
    name="e2m1",
    title="E2M1",
    element="e2m1",
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max=6.0,
    min_normal=1.0,
    min_subnormal=0.5,
    rounding="half_even",
    overflow="saturate",
    has_inf=False,
    has_nan=False,
    source="OCP-MX",
)

MX_BLOCK = 32
NVFP4_BLOCK = 16


def _mx(element: Format, name: str, title: str) -> Format:
    return replace(element, name=name, title=title, block=MX_BLOCK, scale="e8m0", source="OCP-MX")


def _per_tensor(element: Format, name: str, title: str) -> Format:
    return replace(element, name=name, title=title, scale="fp32", source=f"{element.source}, scale: TE")


_ALL = (
    BF16,
    FP16,
    _mx(E4M3, "mxfp8", "MXFP8 E4M3"),
    _mx(E5M2, "mxfp8_e5m2", "MXFP8 E5M2"),
    _mx(E2M3, "mxfp6_e2m3", "MXFP6 E2M3"),
    _mx(E3M2, "mxfp6_e3m2", "MXFP6 E3M2"),
    _mx(E2M1, "mxfp4", "MXFP4"),
    replace(E2M1, name="nvfp4", title="NVFP4", block=NVFP4_BLOCK, scale="e4m3+fp32", source="TE"),
    HIFP8,
    _per_tensor(E4M3, "fp8_e4m3", "FP8 E4M3"),
    _per_tensor(E5M2, "fp8_e5m2", "FP8 E5M2"),
)

FORMATS: Mapping[str, Format] = MappingProxyType({fmt.name: fmt for fmt in _ALL})
ALIASES: Mapping[str, str] = MappingProxyType({"mxfp8_e4m3": "mxfp8"})


def get_format(name: str) -> Format:
    """The record of a format by its name or alias.

    Raises:
        ValueError: There is no such format; the message lists those there are.
    """
    fmt = FORMATS.get(ALIASES.get(name, name))
    if fmt is None:
        raise ValueError(f"unknown number format {name!r}: choose from {', '.join((*FORMATS, *ALIASES))}")
    return fmt
