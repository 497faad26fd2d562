"""Number formats: what they are (`FORMATS`), what they do to a tensor (`fake_quantize`), how they store it (`quantize`).

torch is imported with the first tensor function, not with this package: the records are for everyone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.quantscope.formats.catalog import ALIASES, FORMATS, get_format
from megatron.quantscope.formats.records import Band, Format

if TYPE_CHECKING:
    from megatron.quantscope.formats.dispatch import fake_quantize, fake_quantize_both
    from megatron.quantscope.formats.encoding import Quantized, dequantize, quantize
    from megatron.quantscope.formats.statistics import TensorStatistics, bit_pattern_counts, measure, merge

_LAZY = {
    "fake_quantize": "dispatch",
    "fake_quantize_both": "dispatch",
    "Quantized": "encoding",
    "dequantize": "encoding",
    "quantize": "encoding",
    "TensorStatistics": "statistics",
    "bit_pattern_counts": "statistics",
    "measure": "statistics",
    "merge": "statistics",
}

__all__ = [
    "ALIASES",
    "FORMATS",
    "Band",
    "Format",
    "Quantized",
    "TensorStatistics",
    "bit_pattern_counts",
    "dequantize",
    "fake_quantize",
    "fake_quantize_both",
    "get_format",
    "measure",
    "merge",
    "quantize",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
