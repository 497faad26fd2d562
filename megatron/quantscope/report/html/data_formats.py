"""What the page offers to choose from: the formats, and the metrics of a cell."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import Any

from megatron.quantscope.analysis.exponents import spans
from megatron.quantscope.analysis.format_errors import POW2_FORMATS
from megatron.quantscope.formats import FORMATS, Format
from megatron.quantscope.report.html.encode import number
from megatron.quantscope.report.style import format_color, format_title

Part = dict[str, Any]

E8M0_RULES = ("floor", "rceil")
UNSCALED = "unscaled"
POW2_RULES = ("pow2", UNSCALED)
_SUFFIXES = tuple(f"_{rule}" for rule in (*E8M0_RULES, *POW2_RULES))


def formats(names: Container[str]) -> list[Part]:
    """The formats that the cells have columns of, in the order of the catalogue."""
    return [_format(fmt) for fmt in FORMATS.values() if fmt.name in names]


def format_of(treatment: str) -> Format:
    """The format of a treatment, or of a column of cells: `mxfp8_rceil@2` is of MXFP8."""
    plain = treatment.partition("@")[0]
    return FORMATS[next(name for rule in ("", *_SUFFIXES) if (name := plain.removesuffix(rule)) in FORMATS)]


def _format(fmt: Format) -> Part:
    return {
        "name": fmt.name,
        "title": format_title(fmt.name),
        "color": format_color(fmt.name),
        "bits": fmt.bits,
        "block": fmt.block,
        "scale": fmt.scale,
        "max": number(fmt.max),
        "spans": [
            {"name": span.name, "lower": _exponent(span.lower), "upper": _exponent(span.upper)} for span in spans(fmt)
        ],
        "rules": list(E8M0_RULES if fmt.scale == "e8m0" else POW2_RULES if fmt.name in POW2_FORMATS else ()),
    }


def _exponent(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


@dataclass(frozen=True)
class Metric:
    """One number of a cell.

    Attributes:
        id: As columns of cells are called; with `/` and a treatment behind it where `per_format`.
        title: As the page shows it.
        unit: Behind the numbers.
        scale: `log2`, `linear`, `percent`, `db` or `binades`: how colours and axes are spread.
        worse: Whether `high` or `low` values are the bad ones; None: neither.
        help: What it is, for the reader.
        per_format: Whether it is of a format, and of one of a tensor's GEMMs.
    """

    id: str
    title: str
    unit: str
    scale: str
    worse: str | None
    help: str
    per_format: bool = False

    @property
    def part(self) -> Part:
        """As the page reads it."""
        return asdict(self) | {"per_use": self.per_format}


_SQNR = (
    "Signal over quantisation error: 10 log10(sum x^2 / sum (x - q(x))^2). 6 dB are one bit. "
    "exact: nothing changed; lost: finite values became Inf or NaN."
)
_TOP_RATIO = (
    "Largest magnitude over the median one, of the tensor where this is largest; massive activations are above 1000."
)
METRICS: tuple[Metric, ...] = (
    Metric("sqnr", "SQNR", "dB", "db", "low", _SQNR, True),
    Metric("relative_error", "relative error", "%", "percent", "high", "Root of sum (x - q(x))^2 / sum x^2.", True),
    Metric("underflow", "underflow", "%", "percent", "high", "Elements that become zero, of those that are not.", True),
    Metric("saturated", "saturated", "%", "percent", "high", "Elements above the largest value, and set to it.", True),
    Metric("lost", "lost", "%", "percent", "high", "Finite elements that become Inf or NaN.", True),
    Metric(
        "dead_blocks", "dead blocks", "%", "percent", "high", "Blocks that become zero, of those that are not.", True
    ),
    Metric("amax", "amax", "", "log2", "high", "Largest magnitude."),
    Metric("rms", "rms", "", "log2", None, "Root of the mean square: the typical magnitude."),
    Metric("mean", "mean", "", "linear", None, "Mean of the finite elements."),
    Metric("crest", "crest", "binades", "binades", "high", "log2 of amax / rms: how far the largest stands out."),
    Metric("top_ratio", "amax / median", "", "log2", "high", _TOP_RATIO),
    Metric("kurtosis", "kurtosis", "", "log2", "high", "E[x^4] / E[x^2]^2, the worst tensor's; a Gaussian has 3."),
    Metric("zero_percent", "zeros", "%", "percent", None, "Elements that are zero before any quantisation."),
    Metric("nonfinite", "NaN and Inf", "elements", "linear", "high", "Elements that are NaN or Inf."),
)
"""Every number a cell may have; the page offers those that some cell has."""
