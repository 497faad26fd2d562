"""rank_analysis/ and sample_analysis/: do ranks and micro-batches agree, and where not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, merged
from megatron.quantscope.analysis.agreement import micro_batches, rank_deviation, ranks, spread_by_layer
from megatron.quantscope.analysis.roles import FAMILIES
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_site_image, set_exponent_axis
from megatron.quantscope.report.page import family_legend, new_page
from megatron.quantscope.report.panels import Panels, add_panels, color_bar
from megatron.quantscope.report.style import ALARM, FAMILY_COLORS, MUTED, SEQUENTIAL, SIGNED

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 64
_BYTES, _AMAX, _RMS, _ZEROS = "bytes", "largest |x|", "rms", "zeros"
_MEGABYTE = 1e6
_LEAST_ZEROS = 0.01  # percent: the axis does not end before


def draw_ranks(study: Study, quant_type: str) -> Figure | None:
    """What each rank holds: bytes, largest and typical magnitudes, zeros."""
    return _draw_overview(study, quant_type, ranks(study.of_type(quant_type)), "rank", "ranks")


def draw_micro_batches(study: Study, quant_type: str) -> Figure | None:
    """What each micro-batch holds."""
    frame = micro_batches(study.of_type(quant_type))
    return _draw_overview(study, quant_type, frame, "micro-batch", "micro-batches")


def draw_rank_spread(study: Study, quant_type: str) -> Figure | None:
    """Image: how far ranks are apart, by site and layer; None for one rank."""
    return _draw_spread(
        study,
        quant_type,
        ranks(study.of_type(quant_type)),
        title="Do the ranks agree",
        note="log2 of the largest over the smallest rms among the ranks. Replicated tensors of tensor parallelism must "
        "be at 0; shards and data-parallel ranks hold other values and differ a little.",
    )


def draw_ranks_by_layer(study: Study, quant_type: str) -> Figure | None:
    """Images of ranks by layers: how far the rms of each rank is from the others', a family a panel."""
    from matplotlib.colors import Normalize

    frame = ranks(study.of_type(quant_type))
    frame = frame[frame["layer_idx"].notna() & (frame["rms"] > 0)]
    parts = list(dict.fromkeys(frame.sort_values("order")["part"]))
    images = _deviations(frame, parts)
    if not images:
        return None
    shown, left_out = _farthest(images, parts)
    page = new_page(
        2.0 + 3.0 * len(images),
        0.6 + 0.24 * max(3, len(shown)),
        title="Which rank is off, and in which layer",
        note="log2 of the rms of a rank's tensors over the median of all ranks in that layer, of the site where it is "
        f"farthest. White: the ranks agree; a row of one colour is a rank that differs in every layer.{left_out}",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, [f"{family}s" for family in images], len(images), sharey=True)
    widest = max(0.01, *(float(_distance(image[shown]).max()) for _, image in images.values()))
    names = [parts[place] for place in shown]
    for family, (layers, image) in images.items():
        norm = Normalize(-widest, widest)
        drawn = draw_site_image(panels.of[f"{family}s"], names, layers, image[shown], norm, SIGNED)
    color_bar(page, drawn, list(panels.of.values()), "binades")
    return page


def _deviations(frame: pandas.DataFrame, parts: list[str]) -> dict[str, tuple[list[int], Floats]]:
    """Family -> `rank_deviation`, of the families that several ranks have something in common of."""
    present = [family for family in FAMILIES if (frame["family"] == family).any()]
    images = {family: rank_deviation(frame[frame["family"] == family], parts) for family in present}
    return {family: (layers, image) for family, (layers, image) in images.items() if np.isfinite(image).any()}


def _farthest(images: dict[str, tuple[list[int], Floats]], parts: list[str]) -> tuple[list[int], str]:
    """The places of the ranks to show, and what the note says where these are not all: then the farthest come first."""
    if len(parts) <= _MOST_BARS:
        return list(range(len(parts))), ""
    off = _distance(np.concatenate([image for _, image in images.values()], axis=1)).max(axis=1)
    farthest = np.argsort(-off, kind="stable")[:_MOST_BARS].tolist()
    return farthest, f" Of {len(parts)} ranks the {_MOST_BARS} that are farthest are shown, the farthest first."


def _distance(image: Floats) -> Floats:
    """Binades from the others, 0 where it is not known."""
    return np.where(np.isfinite(image), np.abs(image), 0.0)


def draw_micro_batch_spread(study: Study, quant_type: str) -> Figure | None:
    """Image: how far micro-batches are apart, by site and layer; None for one micro-batch."""
    return _draw_spread(
        study,
        quant_type,
        micro_batches(study.of_type(quant_type)),
        title="Do the micro-batches agree",
        note="log2 of the largest over the smallest rms among the micro-batches. Bright: a statistic of one "
        "micro-batch says little about the next, so a scale from the one before would miss.",
    )


def _draw_overview(study: Study, quant_type: str, frame: pandas.DataFrame, kind: str, plural: str) -> Figure | None:
    if frame.empty:
        return None
    parts = list(dict.fromkeys(frame.sort_values("order")["part"]))
    shown = parts[:_MOST_BARS]
    left_out = f" The first {_MOST_BARS} of {len(parts)} are shown." if len(parts) > _MOST_BARS else ""
    one = f" This capture has one {kind}." if len(parts) == 1 else left_out
    families = [family for family in FAMILIES if (frame["family"] == family).any()]
    page = new_page(
        11.5,
        0.75 + 0.3 * max(2, len(shown)),
        title=f"What each {kind} holds: {len(parts)} {plural if len(parts) > 1 else kind}",
        note=f"Bytes, and by family the largest magnitude, the rms and the zeros.{one}",
        study=study,
        quant_type=quant_type,
        frame=frame,
        legend=family_legend(families),
    )
    panels = add_panels(page, (_BYTES, _AMAX, _RMS, _ZEROS), 4, sharey=True, width_ratios=[1, 1.3, 1.3, 1])
    _draw_bytes(panels.of[_BYTES], frame, shown)
    groups = merged(frame, ["part", "family"])
    for family in families:
        _draw_family(panels, groups, shown, family)
    for title in (_AMAX, _RMS):
        lower, upper = panels.of[title].get_xlim()
        set_exponent_axis(panels.of[title], np.floor(lower) - 0.5, np.ceil(upper) + 0.5, count=6)
    zeros = panels.of[_ZEROS]
    zeros.set(xlabel="% of the elements", xlim=(0, max(_LEAST_ZEROS, zeros.get_xlim()[1])))
    panels.first.set_yticks(range(len(shown)), shown)
    panels.first.set_ylim(max(len(shown), 2) - 0.4, -0.6)
    return page


def _draw_bytes(axes: Axes, frame: pandas.DataFrame, parts: list[str]) -> None:
    totals = frame.groupby("part").agg({"bytes": "sum", "nan": "sum", "inf": "sum", "file": "nunique"})
    for row, part in enumerate(parts):
        values = totals.loc[part]
        bad = int(values["nan"] + values["inf"])
        megabytes = values["bytes"] / _MEGABYTE
        axes.barh(row, megabytes, 0.45, color=MUTED, lw=0)
        text = f" {int(values['file'])} files" + (f", {numbers.count(bad)} NaN or Inf" if bad else "")
        axes.text(megabytes, row, text, va="center", fontsize=6.5, color=ALARM if bad else MUTED)
    room = 2.1 if (totals["nan"] + totals["inf"]).any() else 1.5  # for the text beside the longest bar
    axes.set(xlabel="MB", xlim=(0, room * max(1, totals["bytes"].max()) / _MEGABYTE))


def _draw_family(panels: Panels, groups: pandas.DataFrame, parts: list[str], family: str) -> None:
    rows = {row: groups.loc[(part, family)] for row, part in enumerate(parts) if (part, family) in groups.index}
    style: dict[str, Any] = {"marker": "o", "ms": 4.5, "lw": 0.9, "color": FAMILY_COLORS[family], "clip_on": False}
    for title, column in ((_AMAX, "amax"), (_RMS, "rms")):
        values = np.array([float(values[column]) for values in rows.values()])
        panels.of[title].plot(np.log2(np.where(values > 0, values, np.nan)), list(rows), **style)
    panels.of[_ZEROS].plot([values["zero_percent"] for values in rows.values()], list(rows), **style)


def _draw_spread(study: Study, quant_type: str, frame: pandas.DataFrame, *, title: str, note: str) -> Figure | None:
    from matplotlib.colors import Normalize

    frame = frame[frame["layer_idx"].notna()]
    if frame["part"].nunique() < 2:
        return None
    sites, layers, values = spread_by_layer(frame)
    if not sites:
        return None
    page = new_page(
        7.2,
        0.5 + 0.2 * len(sites),
        title=f"{title}: {frame['part'].nunique()} of them",
        note=note,
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    axes = page.subplots()
    widest = max(0.01, float(np.nanmax(values)))
    image = draw_site_image(axes, sites, layers, values, Normalize(0, widest), SEQUENTIAL)
    color_bar(page, image, axes, "binades")
    return page
