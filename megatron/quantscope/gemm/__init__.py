"""Quantised GEMMs for autograd, and the recipe that says what each module's operands become.

    from megatron.quantscope.gemm import QuantConfig            # flags -> formats of every GEMM
    from megatron.quantscope.gemm.linear import linear          # y = x w^T
    from megatron.quantscope.gemm.attention import attention    # o = softmax(q k^T) v
    from megatron.quantscope.gemm.matmul import matmul          # the one door to a product

torch is imported with the first name that is asked for, not with this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.quantscope.gemm.operands import AttentionQuant, LinearQuant
    from megatron.quantscope.gemm.recipe import QuantConfig
    from megatron.quantscope.gemm.tap import Tap

_LAZY = {"AttentionQuant": "operands", "LinearQuant": "operands", "QuantConfig": "recipe", "Tap": "tap"}

__all__ = ["AttentionQuant", "LinearQuant", "QuantConfig", "Tap"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
