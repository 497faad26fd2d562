"""Colours, lines and marks that mean the same in every figure, and the sheet that sets the rest of the look.

A format has one colour everywhere, out of the colour-blind-safe set of Okabe and Ito, bf16 grey as what all others are
compared with; a mark of its own keeps it apart in print. Families of tensors have line styles and dark, muted colours
that no format has. Sequential maps are viridis, signed ones RdBu_r centred at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.exponents import NORMAL, OVERFLOW, SUBNORMAL, UNDERFLOW
from megatron.quantscope.analysis.format_errors import FLOOR, Treatment
from megatron.quantscope.analysis.roles import ACTIVATION, GRADIENT, WEIGHT, WEIGHT_GRADIENT
from megatron.quantscope.analysis.trained_as import own_treatments
from megatron.quantscope.formats import ALIASES, FORMATS, Format

if TYPE_CHECKING:
    import pandas

_DEFAULT_FORMAT = "mxfp8"
STYLE_SHEET = Path(__file__).with_name("style.mplstyle")

FORMAT_COLORS = {
    "bf16": "#7f7f7f",
    "fp16": "#56b4e9",
    "mxfp8": "#0072b2",
    "mxfp8_e5m2": "#3f4f9f",
    "mxfp6_e2m3": "#e69f00",
    "mxfp6_e3m2": "#b07900",
    "mxfp4": "#d55e00",
    "nvfp4": "#8c3a00",
    "hifp8": "#009e73",
    "fp8_e4m3": "#cc79a7",
    "fp8_e5m2": "#99507a",
}
FORMAT_MARKERS = {
    "bf16": "s",
    "fp16": "D",
    "mxfp8": "o",
    "mxfp8_e5m2": "p",
    "mxfp6_e2m3": "h",
    "mxfp6_e3m2": "H",
    "mxfp4": "^",
    "nvfp4": "<",
    "hifp8": "v",
    "fp8_e4m3": "P",
    "fp8_e5m2": "X",
}
FAMILY_COLORS = {ACTIVATION: "#222222", WEIGHT: "#8c6d31", GRADIENT: "#7b4173", WEIGHT_GRADIENT: "#bd9e39"}
FAMILY_LINES = {ACTIVATION: "-", WEIGHT: "--", GRADIENT: "-.", WEIGHT_GRADIENT: ":"}
SPAN_COLORS = {UNDERFLOW: "#d9d9d9", SUBNORMAL: "#f3e8c8", NORMAL: "#ffffff", OVERFLOW: "#f4d3cc"}
PRECISION_COLORS = {None: "#d9d9d9", 0: "#fde725", 1: "#7ad151", 2: "#22a884", 3: "#2a788e"}

SEQUENTIAL, SIGNED = "viridis", "RdBu_r"
MISSING = "#eeeeee"  # cells of an image without a value
INK, MUTED, FAINT = "#222222", "#666666", "#bbbbbb"
ALARM = "#b2182b"

SHOWN_FORMATS = ("fp16", "hifp8", "fp8_e4m3", "mxfp8", "mxfp4")
"""The formats that comparisons show: one of each way to 16, 8 and 4 bits, in the order of their legends."""


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the sheet, whatever the user's own matplotlib settings are, and without a display."""
    import matplotlib
    from matplotlib import style

    matplotlib.use("Agg")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        style.use(STYLE_SHEET)
        yield


def tried_formats(frame: pandas.DataFrame, names: Sequence[str] = SHOWN_FORMATS) -> list[str]:
    """Those of the formats that the rows of a summary table, or of groups of it, were tried under."""
    columns = {name: f"{name}.sqnr_db" for name in names}
    return [name for name, column in columns.items() if column in frame and frame[column].notna().any()]


def format_color(name: str) -> str:
    """The colour of a format or quant type; black for one that is not known."""
    return FORMAT_COLORS.get(ALIASES.get(name, name), INK)


def format_marker(name: str) -> str:
    """The mark of a format or quant type."""
    return FORMAT_MARKERS.get(ALIASES.get(name, name), ".")


def format_title(name: str) -> str:
    """How figures write a format or quant type."""
    canonical = ALIASES.get(name, name)
    return FORMATS[canonical].title if canonical in FORMATS else name


def treatment_titles(frame: pandas.DataFrame) -> str:
    """How figures write what a run did to the tensors of these rows: "MXFP4, MXFP8 (rceil)"."""
    titles = []
    for name in own_treatments(frame):
        treatment = Treatment.named(name)
        rule = "" if treatment.scale_rule == FLOOR else f" ({treatment.scale_rule})"
        gemm = " in the second GEMM" if treatment.use else ""
        titles.append(f"{format_title(treatment.format)}{rule}{gemm}")
    return ", ".join(titles)


def shown_format(quant_type: str) -> Format:
    """The format whose limits a run is drawn with: its own, or MXFP8 where it has none narrower than bf16."""
    name = ALIASES.get(quant_type, quant_type)
    return FORMATS[name if name in FORMATS and name != "bf16" else _DEFAULT_FORMAT]


def range_format(quant_type: str) -> Format:
    """The format whose range is shaded: the run's own, but MXFP8 where a scale a tensor or NVFP4's moves the range."""
    fmt = shown_format(quant_type)
    return fmt if fmt.scale in (None, "e8m0") else FORMATS[_DEFAULT_FORMAT]


def block_format(quant_type: str) -> Format:
    """The run's own format if its blocks have E8M0 scales, else MXFP8."""
    fmt = shown_format(quant_type)
    return fmt if fmt.scale == "e8m0" else FORMATS[_DEFAULT_FORMAT]
