"""What a run itself did to each tensor, where that is not one format for all of them.

A recipe gives modules formats of their own, and gradient operands may have another one than activations. The column
`trained_as` of the tables names the treatment that the run used in the first GEMM that was given the tensor quantised,
as its metadata say: `mxfp4@2` is MXFP4 in the second of its GEMMs and nothing in the first. The treatment `own` is that
of every row: its columns are those of the treatment that the row names, and NaN where the run left the tensor as it
was, or did something that was not tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.format_errors import FLOOR, POW2_FORMATS, Treatment
from megatron.quantscope.analysis.roles import GRADIENT_FAMILIES, role_of
from megatron.quantscope.flags.quantization import SCALE_RULES
from megatron.quantscope.flags.values import POW2_AMAX
from megatron.quantscope.formats import ALIASES, FORMATS

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.capture import TensorRecord

OWN = "own"
TRAINED_AS = "trained_as"
_PARTS = ("sqnr_db", "error_squares", "underflow", "saturated", "lost", "dead_blocks")


def trained_as(record: TensorRecord) -> str | None:
    """The name of the treatment that the run used on an operand; None: none, or it is not known, or no operand."""
    role = role_of(record.layer_type, record.tensor_name)
    formats = record.formats if isinstance(record.formats, dict) else {}  # a bare file's metadata may be of any make
    found = role.first_quantised(formats)
    fmt = None if found is None else FORMATS.get(ALIASES.get(found[1], found[1]))
    if found is None or fmt is None:
        return None
    rule = formats.get("scale_rule") if fmt.scale == "e8m0" else FLOOR
    rule = rule if rule in SCALE_RULES else FLOOR
    scaled = role.family in GRADIENT_FAMILIES and fmt.name in POW2_FORMATS and formats.get("grad_scale") == POW2_AMAX
    return Treatment(fmt.name, rule, scaled=scaled, use=found[0] if fmt.block else 0).name


def own_treatments(frame: pandas.DataFrame) -> list[str]:
    """The treatments of the rows of a run, those of scaled gradients by the name that `as_trained` gives them."""
    if TRAINED_AS not in frame:
        return []
    return sorted({_as_trained(name) for name in frame[TRAINED_AS].dropna().unique()})


def is_mixed(frame: pandas.DataFrame, name: str) -> bool:
    """Whether a run did something else to some operand than the treatment of this name, or left some as they were.

    One that quantised nothing is not mixed: it is looked at under a format that it did not have.
    """
    used = own_treatments(frame)
    return bool(used) and (used != [name] or bool(frame.loc[frame["operand"], TRAINED_AS].isna().any()))


def with_own(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows (as `aggregate.as_trained` has made them) with the columns of the treatment `own`."""
    import pandas

    used = frame[TRAINED_AS].map(_as_trained, na_action="ignore")
    columns = {f"{OWN}.{part}": pandas.Series(float("nan"), index=frame.index) for part in _PARTS}
    for name in own_treatments(frame):
        rows = used == name
        for part in _PARTS if f"{name}.error_squares" in frame else ():
            columns[f"{OWN}.{part}"] = columns[f"{OWN}.{part}"].mask(rows, frame[f"{name}.{part}"].astype(float))
    return pandas.concat([frame, pandas.DataFrame(columns)], axis=1)


def layers_by_treatment(frame: pandas.DataFrame) -> dict[str, dict[str | None, list[int]]]:
    """Site -> treatment (None: left as it was) -> layers, of the operands in the layers of a run."""
    operands = frame[frame["operand"] & frame["layer_idx"].notna()]
    found: dict[str, dict[str | None, list[int]]] = {}
    columns: Sequence[str] = ("site", TRAINED_AS, "layer_idx")
    for site, name, layer in operands[list(columns)].drop_duplicates().itertuples(index=False):
        treatment = _as_trained(name) if isinstance(name, str) else None
        found.setdefault(site, {}).setdefault(treatment, []).append(int(layer))
    return found


def _as_trained(name: str) -> str:
    """`hifp8` for `hifp8_pow2`: the columns of gradients have that name once `as_trained` has been there."""
    treatment = Treatment.named(name)
    return treatment.format if treatment.scaled else name
