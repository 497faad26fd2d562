"""Every figure there is: its topic, which is its directory, its name, and the function that draws it.

To add a figure, write a function that takes a study (and a quant type) and returns a matplotlib figure, or None where
the capture has nothing for it to show, and add a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PACKAGE = "megatron.quantscope.report"


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        topic: Its directory; empty: the output directory itself.
        name: Its file name without quant type and suffix.
        function: `module:function` in this package.
        per_type: Whether it is drawn for each quant type; its function then takes the type, and its file is named
            `{name}_{type}.png`.
        absent: Why a capture may not have it; said when the function returns None.
    """

    topic: str
    name: str
    function: str
    per_type: bool = True
    absent: str = "the capture has no tensors for it"

    def drawing(self) -> Callable[..., Figure | None]:
        """The function."""
        module, _, function = self.function.partition(":")
        found: Any = getattr(import_module(f"{_PACKAGE}.{module}"), function)
        drawing: Callable[..., Figure | None] = found
        return drawing


_ONE_RUN = "it has no two types to compare, or they are equal"
_NO_LAYERS = "no tensor is of a numbered layer"
_NO_OPERANDS = "no GEMM operand was captured"
_NO_MX = "no GEMM operand was captured, or no MX format tried"
_NO_ATTENTION = "no query and key of one layer were captured"

QUICK = FigureSpec("", "quick_analysis", "quick:draw_quick_analysis", per_type=False)
FIGURES = (
    QUICK,
    FigureSpec("quantization_analysis", "format_overview", "quantization:draw_format_overview", absent=_NO_OPERANDS),
    FigureSpec("quantization_analysis", "sqnr_by_layer", "quantization:draw_sqnr_by_layer", absent=_NO_OPERANDS),
    FigureSpec(
        "quantization_analysis", "underflow_by_layer", "quantization:draw_underflow_by_layer", absent=_NO_OPERANDS
    ),
    FigureSpec(
        "quantization_analysis", "saturation_by_layer", "quantization:draw_saturation_by_layer", absent=_NO_OPERANDS
    ),
    FigureSpec(
        "quantization_analysis",
        "relative_error_by_layer",
        "quantization:draw_relative_error_by_layer",
        absent=_NO_OPERANDS,
    ),
    FigureSpec("quantization_analysis", "scale_rules", "pairs_by_layer:draw_scale_rules", absent=_NO_MX),
    FigureSpec("quantization_analysis", "second_gemm", "pairs_by_layer:draw_second_gemm", absent=_NO_MX),
    FigureSpec("quantization_analysis", "block_maps", "operands:draw_block_maps", absent=_NO_OPERANDS),
    FigureSpec("quantization_analysis", "pairs", "operands:draw_pairs", absent=_NO_OPERANDS),
    FigureSpec("hifp8_analysis", "band_use", "hifp8:draw_band_use", absent=_NO_OPERANDS),
    FigureSpec("hifp8_analysis", "full_precision", "hifp8:draw_full_precision", absent=_NO_OPERANDS),
    FigureSpec("hifp8_analysis", "against_mxfp8", "hifp8:draw_against_mxfp8", absent=_NO_OPERANDS),
    FigureSpec("layer_analysis", "amax", "layers:draw_amax", absent=_NO_LAYERS),
    FigureSpec("layer_analysis", "rms", "layers:draw_rms", absent=_NO_LAYERS),
    FigureSpec("layer_analysis", "kurtosis", "layers:draw_kurtosis", absent=_NO_LAYERS),
    FigureSpec("layer_analysis", "underflow", "layers:draw_underflow", absent=_NO_LAYERS),
    FigureSpec("layer_analysis", "massive_activations", "massive:draw_massive_activations", absent=_NO_LAYERS),
    FigureSpec("rank_analysis", "ranks", "places:draw_ranks"),
    FigureSpec("rank_analysis", "rank_spread", "places:draw_rank_spread", absent="the capture has one rank"),
    FigureSpec("rank_analysis", "ranks_by_layer", "places:draw_ranks_by_layer", absent="the capture has one rank"),
    FigureSpec("sample_analysis", "micro_batches", "places:draw_micro_batches"),
    FigureSpec(
        "sample_analysis", "micro_batch_spread", "places:draw_micro_batch_spread", absent="it has one micro-batch"
    ),
    FigureSpec("overflow_analysis", "amax_against_limits", "overflow:draw_amax_against_limits", absent=_NO_LAYERS),
    FigureSpec("overflow_analysis", "headroom", "overflow:draw_headroom", absent=_NO_LAYERS),
    FigureSpec("overflow_analysis", "clipped", "overflow:draw_clipped", absent=_NO_OPERANDS),
    FigureSpec("distributions", "exponent_histograms", "distributions:draw_exponent_histograms"),
    FigureSpec("distributions", "exponents_by_layer", "distributions:draw_exponents_by_layer", absent=_NO_LAYERS),
    FigureSpec("distributions", "boxes", "spreads:draw_boxes", absent=_NO_LAYERS),
    FigureSpec("distributions", "normal_quantiles", "spreads:draw_normal_quantiles", absent=_NO_LAYERS),
    FigureSpec("distributions", "survival", "survival:draw_survival", absent=_NO_LAYERS),
    FigureSpec("heatmaps", "surfaces", "surfaces:draw_surfaces", absent=_NO_LAYERS),
    FigureSpec("heatmaps", "channel_amax", "surfaces:draw_channel_images", absent=_NO_LAYERS),
    FigureSpec("heatmaps", "channel_curves", "surfaces:draw_channel_curves", absent=_NO_LAYERS),
    FigureSpec("comparisons", "formats", "comparisons:draw_formats", absent=_NO_OPERANDS),
    FigureSpec("comparisons", "crest_factor", "comparisons:draw_crest_factors", absent=_NO_OPERANDS),
    FigureSpec("comparisons", "losses", "runs:draw_losses", per_type=False, absent="it has one type and one iteration"),
    FigureSpec("comparisons", "divergence", "runs:draw_divergence", per_type=False, absent=_ONE_RUN),
    FigureSpec("comparisons", "error_growth", "growth:draw_error_growth", per_type=False, absent=_ONE_RUN),
    FigureSpec("comparisons", "worst_tensors", "growth:draw_worst", per_type=False, absent=_ONE_RUN),
    FigureSpec("attention_maps", "maps", "attention:draw_maps", absent=_NO_ATTENTION),
    FigureSpec("attention_maps", "heads", "attention:draw_heads", absent=_NO_ATTENTION),
    FigureSpec("statistics", "block_scales", "block_scales:draw_block_scales", absent=_NO_OPERANDS),
    FigureSpec("statistics", "sites", "statistics:draw_table"),
)
TOPICS = tuple(dict.fromkeys(spec.topic for spec in FIGURES if spec.topic))
