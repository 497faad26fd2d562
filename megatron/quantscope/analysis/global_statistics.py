"""The capture in numbers, as one plain structure: what global_statistics.json holds.

    {"schema": 1, "source": DIR, "types": {TYPE: {...}}, "problems": [...]}

A type has `total` and, by the values of a field, `by_layer_type`, `by_operation`, `by_family` and `by_site`; each is a
set of counts and statistics, with `formats`: what every treatment would do to those elements. No value is NaN or Inf:
what has no number is null, with `exact` or `lost` beside an SQNR that has none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.aggregate import merged, treatments_of
from megatron.quantscope.analysis.losses import losses_by_type
from megatron.quantscope.analysis.study import Study

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
GROUPINGS = ("layer_type", "operation", "family", "site")
_COUNTS = ("rows", "bytes", "count", "zero", "nan", "inf")
_STATISTICS = ("min", "max", "amax", "mean", "rms", "kurtosis")
_ERRORS = ("underflow_percent", "saturated_percent", "lost_percent")


def global_statistics(study: Study) -> dict[str, Any]:
    """All statistics of a study, of built-in types that JSON holds."""
    losses = losses_by_type(study.commits, study.types)
    return {
        "schema": SCHEMA,
        "source": study.source,
        "types": {
            name: {
                "run_id": study.run_info.get(name, {}).get("run_id"),
                "captured_rows": int((study.index["quant_type"] == name).sum()),
                "losses": {str(iteration): loss for iteration, loss in losses.get(name, {}).items()},
                **_statistics(study.of_type(name)),
            }
            for name in study.types
        },
        "problems": list(study.problems),
    }


def _statistics(frame: pandas.DataFrame) -> dict[str, Any]:
    names = treatments_of(frame)
    total = _entries(merged(frame.assign(all="all"), "all"), names)["all"]
    return {"total": total} | {f"by_{column}": _entries(merged(frame, column), names) for column in GROUPINGS}


def _entries(groups: pandas.DataFrame, names: list[str]) -> dict[str, dict[str, Any]]:
    return {str(key): _entry(row, names) for key, row in groups.iterrows()}


def _entry(row: pandas.Series, names: list[str]) -> dict[str, Any]:
    entry: dict[str, Any] = {name: int(row[name]) for name in _COUNTS}
    entry |= {name: finite_or_none(row[name]) for name in _STATISTICS}
    entry["zero_percent"] = finite_or_none(row["zero_percent"])
    entry["formats"] = {name: _errors(row, name) for name in names}
    return entry


def _errors(row: pandas.Series, name: str) -> dict[str, Any]:
    sqnr = float(row[f"{name}.sqnr_db"])
    errors: dict[str, Any] = {"sqnr_db": finite_or_none(sqnr), "exact": sqnr == math.inf, "lost": sqnr == -math.inf}
    return errors | {part: finite_or_none(row[f"{name}.{part}"]) for part in _ERRORS}


def finite_or_none(value: Any) -> float | None:
    """A number as JSON can hold it."""
    number = float(value) if value is not None else math.nan
    return number if math.isfinite(number) else None
