"""Massive activations, and outlier channels that many layers share.

A massive activation is one value thousands of times its neighbours, in the same channel of many layers and at the same
few tokens (`analysis.massive`). An outlier channel is larger than the others in many layers (Dettmers et al.,
"LLM.int8()", 2022, whose six and whose quarter of the layers these are).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.findings.finding import NOTE, WARNING, Finding, Place, figure_path
from megatron.quantscope.analysis.findings.words import layers, listed, number, signed, times, title_of
from megatron.quantscope.analysis.massive import LayerPeak, MassiveActivation, massive_activations
from megatron.quantscope.analysis.study import Study

if TYPE_CHECKING:
    import pandas

_OUTLIER_TIMES = 6.0  # the median channel's amax: Gaussian channels stay below twice it
_SHARE_OF_LAYERS = 0.25
_FEWEST_LAYERS = 3
_MOST_OUTLIERS = 0.05  # of the channels: more are no outliers but parts of different scale, as q, k and v side by side
_MOST_CHANNELS, _MOST_LAYERS = 4, 3  # that a sentence names
_STREAMS = ("x", "dy")  # operands whose channels are features
_RESULTS = (".y", ".o")  # where an activation is made; other sites only hold it

_Channel = tuple[int, int]  # of how many channels, and which


def find_massive_activations(study: Study) -> Iterator[Finding]:
    """One finding a channel that several sites share, and one for each other site; the runs of all types together."""
    of_type = {quant_type: massive_activations(study.of_type(quant_type)) for quant_type in study.types}
    told: set[tuple[str, int | None]] = set()
    for quant_type, found in of_type.items():
        new = [one for one in found if _identity(one) not in told]
        told |= {_identity(one) for one in new}
        for group in _grouped(new):
            shared = [name for name, others in of_type.items() if any(_same(group[0], other) for other in others)]
            yield _massive_finding(study, quant_type, group, shared)


def find_outlier_channels(study: Study) -> Iterator[Finding]:
    """One finding a site of the baseline run whose channels stand out in many layers."""
    quant_type = study.types[0]
    frame = study.of_type(quant_type)
    rows = frame[frame["operand"] & frame["layer_idx"].notna() & frame["symbol"].isin(_STREAMS)]
    for site, of_site in rows.groupby("site"):
        finding = _outlier_finding(quant_type, str(site), of_site)
        if finding is not None:
            yield finding


def _identity(one: MassiveActivation) -> tuple[str, int | None]:
    """What is told once: a channel of a result; of an operand, whose channels vary from run to run, the site."""
    return one.site, one.channel if one.site.endswith(_RESULTS) else None


def _same(one: MassiveActivation, other: MassiveActivation) -> bool:
    return (one.site, one.channel) == (other.site, other.channel)


def _grouped(found: Sequence[MassiveActivation]) -> list[list[MassiveActivation]]:
    """Those of one channel, where several sites have it; the others by site. Where it is made comes first."""
    by_channel: dict[_Channel, list[MassiveActivation]] = {}
    by_site: dict[str, list[MassiveActivation]] = {}
    for one in found:
        by_channel.setdefault((one.channels, one.channel), []).append(one)
    groups = []
    for group in by_channel.values():
        if len({one.site for one in group}) > 1:
            groups.append(sorted(group, key=lambda one: (not one.site.endswith(_RESULTS), -abs(one.largest.value))))
        else:
            by_site.setdefault(group[0].site, []).extend(group)
    return groups + list(by_site.values())


def _massive_finding(
    study: Study, quant_type: str, group: Sequence[MassiveActivation], shared: Sequence[str]
) -> Finding:
    first = group[0]
    peak = first.largest
    token = _token(study, quant_type, first, peak)
    sentences = [
        f"It is {times(peak.times_median)} the median magnitude of its tensor"
        f"{'' if token is None else f', at token {token}'}{_runs(study, shared)}.",
        *(_course(one) for one in group if one.site == first.site and one.channel == first.channel),
        *(_elsewhere(one) for one in group[1:]),
    ]
    numbers: dict[str, float | int | str] = {
        "value": peak.value,
        "channel": first.channel,
        "channels": first.channels,
        "times_median": peak.times_median,
    }
    return Finding(
        kind="massive_activation",
        severity=WARNING if first.site.endswith(_RESULTS) else NOTE,
        title=f"Massive activation: channel {first.channel} of {first.site} reaches {number(abs(peak.value))} in layer "
        f"{peak.layer}",
        text=" ".join(sentence for sentence in sentences if sentence),
        numbers=numbers if token is None else numbers | {"token": token},
        place=Place(quant_type=quant_type, site=first.site, layer=peak.layer),
        metric="amax",
        figure=figure_path("layer_analysis", "massive_activations", quant_type),
        weight=peak.times_median / 100,
    )


def _token(study: Study, quant_type: str, one: MassiveActivation, peak: LayerPeak) -> int | None:
    """Where in the sequence it is, where one of the surfaces shows the tensor."""
    for surface in study.surfaces:
        place = surface.place
        same = (place.quant_type, place.site, place.layer) == (quant_type, one.site, peak.layer)
        if same and surface.peak[1] == one.channel:
            return surface.peak[0]
    return None


def _runs(study: Study, shared: Sequence[str]) -> str:
    if len(study.types) == 1:
        return ""
    if len(shared) == len(study.types):
        return f", in the runs of all {len(shared)} types"
    return f", in the {listed([title_of(name) for name in shared])} run{'' if len(shared) == 1 else 's'}"


def _course(one: MassiveActivation) -> str:
    """Where else along the depth the channel stands out, and whether it is taken out again."""
    largest, opposed = one.largest, one.opposed
    before = [peak for peak in one.peaks if peak is not largest and peak not in opposed]
    same = [f"{signed(peak.value)} in layer {peak.layer}" for peak in sorted(before, key=lambda peak: -abs(peak.value))]
    sentences = [f"{one.site} holds {signed(largest.value)} there, and {listed(same, _MOST_LAYERS)}."] if same else []
    if opposed and one.site.endswith(_RESULTS):
        against = listed([f"{signed(peak.value)} in layer {peak.layer}" for peak in opposed], _MOST_LAYERS)
        sentences.append(f"Later it has the other sign ({against}): what was added to the stream is taken out again.")
    return " ".join(sentences)


def _elsewhere(one: MassiveActivation) -> str:
    what = "the residual stream" if one.site.startswith("residual.") else one.site
    verb = "reaches" if len(one.layers) == 1 else "stands out, with up to"
    return f"Channel {one.channel} of {what} {verb} {number(abs(one.largest.value))}, in {layers(one.layers)}."


def _outlier_finding(quant_type: str, site: str, rows: pandas.DataFrame) -> Finding | None:
    layer_numbers, image = _channels(rows)
    needed = max(_FEWEST_LAYERS, _SHARE_OF_LAYERS * len(layer_numbers))
    in_layers = (image >= _OUTLIER_TIMES).sum(axis=0)
    outliers = [int(channel) for channel in np.argsort(-in_layers, kind="stable") if in_layers[channel] >= needed]
    if not outliers or len(outliers) > _MOST_OUTLIERS * image.shape[1]:
        return None
    of = len(layer_numbers)
    named = [f"{one} ({in_layers[one]} layers, up to {times(float(image[:, one].max()))})" for one in outliers]
    worst = outliers[0]
    layer = layer_numbers[int(image[:, worst].argmax())]
    return Finding(
        kind="outlier_channels",
        severity=NOTE,
        title=f"Outlier channels of {site}: {listed([str(one) for one in outliers], _MOST_CHANNELS)} of "
        f"{image.shape[1]}, {worst} in {in_layers[worst]} of {of} layers",
        text=f"An amax of {_OUTLIER_TIMES:g} times the median channel's or more: channel "
        f"{listed(named, _MOST_CHANNELS)}. Each sets the scale of its block, so that its neighbours keep fewer bits.",
        numbers={
            "channels": len(outliers),
            "channel": worst,
            "layers": int(in_layers[worst]),
            "times_median_channel": float(image[:, worst].max()),
        },
        place=Place(quant_type=quant_type, site=site, layer=layer),
        metric="amax",
        figure=figure_path("heatmaps", "channel_amax", quant_type),
        weight=float(in_layers[worst]) / needed,
    )


def _channels(rows: pandas.DataFrame) -> tuple[list[int], np.ndarray]:
    """The layers, and [layers, channels]: the amax of each channel over the median channel's of its layer."""
    width = max((len(values) for values in rows["channel_amax"]), default=0)
    by_layer: dict[int, np.ndarray] = {}
    for layer, values in zip(rows["layer_idx"], rows["channel_amax"], strict=True):
        if len(values) == width > 0:
            finite = np.nan_to_num(np.asarray(values, dtype=float), nan=0.0, posinf=0.0)
            by_layer[int(layer)] = np.maximum(by_layer.get(int(layer), 0.0), finite)
    image = np.array([by_layer[layer] for layer in sorted(by_layer)]).reshape(len(by_layer), width)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = image / np.median(image, axis=1, keepdims=True) if width else image
    return sorted(by_layer), np.where(np.isfinite(ratio), ratio, 0.0)
