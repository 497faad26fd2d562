"""The one door to a matrix product of quantised operands.

On a CPU without matrix units for a 16-bit dtype, torch's own product of that dtype is slow; widening the operands to
float32, multiplying there and rounding the result back is 3-30 times faster and rounds once, as the native product
does. Where the CPU has the units, the native product is twice as fast as the widened one. 256x576x3072, one thread:

                        bf16 native  widened   fp16 native  widened
    AVX512-BF16, ms             4.1      9.3      46 - 273      9.3
    AVX-512 only, ms             42      6.7

The choice is made once, from the CPU's flags. The environment variable QUANTSCOPE_GEMM (`native` or `widened`) makes
it by hand, e.g. to compare runs of two machines: the order of the sums differs, hence the last bits.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

CHOICES = ("native", "widened")
_ENVIRONMENT = "QUANTSCOPE_GEMM"
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_FLAGS = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16"}),
}
"""Any of these makes the native product of a 16-bit dtype the faster one."""


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a and b in their common dtype, summed in float32 for 16-bit dtypes and rounded once.

    Raises:
        ValueError: QUANTSCOPE_GEMM is set to something else than `native` or `widened`.
    """
    if is_widened(a):
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    return torch.matmul(a, b)


def matmul_unrounded(a: Tensor, b: Tensor) -> Tensor:
    """Multiply and leave the product of 16-bit operands in float32, as a term of a longer sum."""
    if a.dtype in _CPU_FLAGS:
        return torch.matmul(a.float(), b.float())
    return torch.matmul(a, b)


def is_widened(operand: Tensor) -> bool:
    """Whether `matmul` multiplies operands like this one in float32."""
    return operand.device.type == "cpu" and operand.dtype in _CPU_FLAGS and _choice(operand.dtype) == "widened"


def _choice(dtype: torch.dtype) -> str:
    choice = os.environ.get(_ENVIRONMENT) or ("native" if _CPU_FLAGS[dtype] & cpu_flags() else "widened")
    if choice not in CHOICES:
        raise ValueError(f"{_ENVIRONMENT}={choice!r} is not allowed: choose from {', '.join(CHOICES)}")
    return choice


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of the first CPU as Linux names them; none where the system does not tell."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
