"""What the figures draw from: the two tables, what the runs said of themselves, and the details of a few tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.aggregate import as_trained
from megatron.quantscope.analysis.attention import AttentionView
from megatron.quantscope.analysis.scan import ScanLog
from megatron.quantscope.analysis.surfaces import Surface
from megatron.quantscope.flags.quantization import UNQUANTIZED
from megatron.quantscope.formats import FORMATS

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.analysis.findings import Finding

_PLAIN_TYPES = ("fp32", "float32", "bf16", "bfloat16", UNQUANTIZED, "fp16", "float16")


@dataclass(frozen=True, kw_only=True)
class Study:
    """An analysed capture. Holds no tensor.

    Attributes:
        source: The capture's directory, for captions.
        index: A row a captured row (`tables.RECORD_COLUMNS`).
        summary: A row a file (`tables.summary_columns`).
        commits: Quant type -> iteration -> scalars of the completed iterations.
        run_info: Quant type -> what its run.json says.
        problems: One line for everything that could not be read.
        attention: Recomputed attention of some layers.
        surfaces: Tokens by channels of a few tensors.
        comparison: A row a tensor that was compared with the baseline's (`comparison.compare`); None: nothing was.
        findings: What stands out, the most severe first (`findings.find`).
        selection: What was asked for, in words, where that is not the whole capture; for captions.
        scan: How many tensors were read for it, and how many were known.
    """

    source: str
    index: pandas.DataFrame
    summary: pandas.DataFrame
    commits: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    run_info: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    attention: list[AttentionView] = field(default_factory=list)
    surfaces: list[Surface] = field(default_factory=list)
    comparison: pandas.DataFrame | None = None
    findings: list[Finding] = field(default_factory=list)
    selection: str = ""
    scan: ScanLog = field(default_factory=ScanLog)

    @cached_property
    def types(self) -> list[str]:
        """The quant types of the capture, those without quantisation first, so `types[0]` is the baseline."""
        return ordered_types(self.summary["quant_type"].unique())

    def of_type(self, quant_type: str) -> pandas.DataFrame:
        """The summary rows of one type, errors as training makes them (`aggregate.as_trained`)."""
        return self._trained[self._trained["quant_type"] == quant_type]

    @cached_property
    def _trained(self) -> pandas.DataFrame:
        return as_trained(self.summary)


def ordered_types(types: Iterable[str]) -> list[str]:
    """Quant types, the plain ones first, then as the formats are listed: the first is what others are compared with."""
    order = [*_PLAIN_TYPES, *FORMATS]
    return sorted(types, key=lambda name: (order.index(name) if name in order else len(order), name))
