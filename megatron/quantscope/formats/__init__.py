"""Number formats: what they are (`FORMATS`), do to a tensor (`fake_quantize`) and make of it in store (`quantize`).

torch is imported with the first tensor function, not with this package: the records are for everyone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.quantscope.formats.catalog import ALIASES, FORMATS, get_format
from megatron.quantscope.formats.records import Band, Format

if TYPE_CHECKING:
    from megatron.quantscope.formats.block_exponents import block_counts, measure_blocks
    from megatron.quantscope.formats.blocks import BlockCounts, count_blocks
    from megatron.quantscope.formats.damage import FormatDamage
    from megatron.quantscope.formats.dispatch import fake_quantize, fake_quantize_both
    from megatron.quantscope.formats.encoding import Quantized, dequantize, quantize
    from megatron.quantscope.formats.errors import BlockFigures, FormatStatistics, measure_format, measure_formats
    from megatron.quantscope.formats.measuring import measure
    from megatron.quantscope.formats.patterns import bit_pattern_counts
    from megatron.quantscope.formats.statistics import TensorStatistics, merge

_LAZY = {
    "block_counts": "block_exponents",
    "measure_blocks": "block_exponents",
    "BlockCounts": "blocks",
    "count_blocks": "blocks",
    "FormatDamage": "damage",
    "fake_quantize": "dispatch",
    "fake_quantize_both": "dispatch",
    "Quantized": "encoding",
    "dequantize": "encoding",
    "quantize": "encoding",
    "BlockFigures": "errors",
    "FormatStatistics": "errors",
    "measure_format": "errors",
    "measure_formats": "errors",
    "measure": "measuring",
    "bit_pattern_counts": "patterns",
    "TensorStatistics": "statistics",
    "merge": "statistics",
}

__all__ = [
    "ALIASES",
    "FORMATS",
    "Band",
    "BlockCounts",
    "BlockFigures",
    "Format",
    "FormatDamage",
    "FormatStatistics",
    "Quantized",
    "TensorStatistics",
    "bit_pattern_counts",
    "block_counts",
    "count_blocks",
    "dequantize",
    "fake_quantize",
    "fake_quantize_both",
    "get_format",
    "measure",
    "measure_blocks",
    "measure_format",
    "measure_formats",
    "merge",
    "quantize",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
