"""Which formats a run is judged by."""

from __future__ import annotations

from megatron.quantscope.analysis.aggregate import treatments_of
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.formats import ALIASES, FORMATS

_WIDE = ("bf16", "fp32")
_COMMON = ("fp16", "hifp8", "fp8_e4m3", "mxfp8", "mxfp4")
"""Formats that a run without one of its own is tried under: one of each way to 16, 8 and 4 bits."""
SECOND = "@2"  # of the names of treatments along the axis of a tensor's second GEMM


def formats_of(study: Study, quant_type: str) -> list[str]:
    """The run's own format; of a plain run those that are commonly tried and that no other run of the capture shows."""
    tried = set(treatments_of(study.summary))
    own = ALIASES.get(quant_type, quant_type)
    if own in FORMATS and own not in _WIDE:
        return [own] if own in tried else []
    shown = {ALIASES.get(name, name) for name in study.types}
    return [name for name in _COMMON if name in tried and name not in shown]


def treatments_with_uses(study: Study, name: str) -> list[str]:
    """The treatment of a format along the axis of each GEMM that the table has it for."""
    tried = set(treatments_of(study.summary))
    return [treatment for treatment in (name, f"{name}{SECOND}") if treatment in tried]
