"""Tensors that several ranks keep a copy of, and whose copies are not the same.

Ranks hold one tensor alike where no step of its `shard` divides it among them: weights of data-parallel ranks, and
what the tensor-parallel ranks of one data-parallel rank compute on its samples in full. A difference means that they
have parted: a missed all-reduce, another seed, a kernel that is not deterministic, a broken device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.findings.finding import CRITICAL, WARNING, Finding, Place, figure_path
from megatron.quantscope.analysis.findings.words import counted, layers, listed, percent, title_of
from megatron.quantscope.analysis.roles import WEIGHT
from megatron.quantscope.analysis.study import Study

if TYPE_CHECKING:
    import pandas

_TENSOR = ["iteration", "module", "layer_type", "phase", "tensor_name"]
_OF_SAMPLES = ("sample_idx", "dp_rank", "operation")  # a weight is one in an iteration, whatever it was used for
_COMPARED = ["count", "zero", "nan", "inf", "min", "max", "sum", "sum_squares"]
_KNOWN_AXIS = "tp"  # whose rank the tables tell; tensors that are divided along another are not compared
_EXPERTS = ".experts."  # modules of the same name that are others on every expert-parallel rank


def find_rank_disagreement(study: Study) -> Iterator[Finding]:
    """One finding a type whose replicated tensors differ."""
    for quant_type in study.types:
        frame = study.of_type(quant_type)
        if frame["rank"].nunique() > 1 and {"shard", "tp_rank", "dp_rank"} <= set(frame.columns):
            finding = _finding(quant_type, replicas(frame))
            if finding is not None:
                yield finding


def replicas(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows of tensors that several ranks hold alike, with `copy_of`: equal for the copies of one tensor."""
    axes = [_axes(shard) for shard in frame["shard"]]
    whole = [found is not None and found <= {_KNOWN_AXIS} for found in axes]
    rows = frame.assign(divided=[bool(found) for found in axes])[whole]
    rows = rows[rows["module"].notna() & ~rows["module"].fillna("").str.contains(_EXPERTS, regex=False)]
    rows = rows[rows["stage"] != "partial"] if "stage" in rows else rows
    of_samples = {name: rows[name].where(rows["family"] != WEIGHT) for name in _OF_SAMPLES}
    keys = rows[_TENSOR].assign(**of_samples, tp_rank=rows["tp_rank"].where(rows["divided"]))
    rows = rows.assign(copy_of=keys.groupby(list(keys.columns), dropna=False).ngroup())
    shared = rows.groupby("copy_of")["rank"].transform("nunique") > 1
    return rows[shared]


def _axes(shard: Any) -> set[str] | None:
    """The axes of parallelism that a tensor is divided along; None: not known, or it is a summand."""
    if not isinstance(shard, str) or not shard:
        return None
    splits = json.loads(shard)
    return None if any("reduce" in split for split in splits) else {str(split.get("over")) for split in splits}


def _finding(quant_type: str, rows: pandas.DataFrame) -> Finding | None:
    if rows.empty:
        return None
    distinct = rows.groupby("copy_of")[_COMPARED].nunique(dropna=False).max(axis=1)
    differing = rows[rows["copy_of"].isin(distinct[distinct > 1].index)]
    if differing.empty:
        return None
    first = differing.sort_values(["iteration", "counter"]).iloc[0]
    copies = differing[differing["copy_of"] == first["copy_of"]]
    low, high = float(copies["rms"].min()), float(copies["rms"].max())
    apart = 100 * (high / low - 1) if low > 0 else 0.0
    layer = None if first["layer_idx"] != first["layer_idx"] else int(first["layer_idx"])
    where = f"{first['site']}{'' if layer is None else f' of layer {layer}'}"
    count, compared = int(differing["copy_of"].nunique()), int(rows["copy_of"].nunique())
    return Finding(
        kind="rank_disagreement",
        severity=CRITICAL if (differing["family"] == WEIGHT).any() else WARNING,
        title=f"{title_of(quant_type)} run: ranks disagree on {counted(count, 'replicated tensor')}, first on {where}",
        text=_text(copies, differing, apart, f"{count} of the {compared}"),
        numbers={"tensors": count, "compared": compared, "rms_percent": apart},
        place=Place(
            quant_type=quant_type,
            site=first["site"],
            layer=layer,
            rank=int(first["rank"]),
            iteration=None if first["iteration"] != first["iteration"] else int(first["iteration"]),
        ),
        metric="rms",
        figure=figure_path("rank_analysis", "rank_spread", quant_type),
        weight=float(count),
    )


def _text(copies: pandas.DataFrame, differing: pandas.DataFrame, apart: float, share: str) -> str:
    ranks = listed([str(rank) for rank in sorted({int(rank) for rank in copies["rank"]})])
    by = f": their rms differ by {percent(apart)}" if apart > 0 else ", though their rms is the same"
    sites = [
        f"{site} ({layers(int(layer) for layer in of_site['layer_idx'].dropna())})"
        for site, of_site in differing.groupby("site", sort=False)
    ]
    return (
        f"Ranks {ranks} should hold the same values there and do not{by}. {share} tensors that ranks hold alike "
        f"differ: {listed(sites)}."
    )
