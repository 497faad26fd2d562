"""What became of a recipe on a model: every module with a GEMM, and the formats that its operands have.

As a table for the start of a run, short however deep the model is: modules that are treated alike in the same layers
share a row. As JSON for `run.json`, complete: every module by its full name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.quantscope.flags.quantization import UNQUANTIZED
from megatron.quantscope.flags.values import NO_GRAD_SCALE
from megatron.quantscope.formats import get_format
from megatron.quantscope.gemm.operands import GRADIENT_OPERANDS

_ANY = "*"
_RULES = ("scale_rule", "grad_scale")  # beside the GEMMs in what `formats` gives
_SILENT_PARTS = frozenset({"self_attention", "mlp", "local_experts"})  # of a name: they tell nothing that others do not
_NO_RULE = "-"
Groups = dict[tuple[str, tuple[int, ...]], list[str]]  # (treatment, layers) -> labels


@dataclass(frozen=True, kw_only=True)
class ResolvedModule:
    """One module.

    Attributes:
        name: Full name with global layer and expert numbers.
        layer_idx: From 0; None: it is outside the layers.
        formats: What `LinearQuant.formats` or `AttentionQuant.formats` says; None: upstream's own path.
    """

    name: str
    layer_idx: int | None
    formats: Mapping[str, Any] | None

    @property
    def treatment(self) -> str:
        """The formats as text: equal for modules that are treated alike."""
        return json.dumps(self.formats, sort_keys=True)


def table(modules: Sequence[ResolvedModule], num_layers: int) -> list[tuple[str, ...]]:
    """Rows for the start of a run, a header first: which modules of which layers have which operands in which format.

    A row of a treatment with several formats is followed by rows without a module. An operand that has one format in
    all of its GEMMs is called by its name alone; a rule that does not concern it is "-".
    """
    rows: list[tuple[str, ...]] = [
        ("modules", f"layers of {num_layers}", "operands", "format", "scale rule", "gradient scale")
    ]
    formats = {module.treatment: module.formats for module in modules}
    for (treatment, layers), labels in _groups(modules).items():
        where = ", ".join(labels), ranges(layers) if layers else _NO_RULE
        for cells in _operand_rows(formats[treatment]):
            rows.append((*where, *cells))
            where = "", ""
    return rows


def grouped(modules: Sequence[ResolvedModule]) -> list[dict[str, Any]]:
    """Plain JSON: the names of all modules that are treated alike, and their formats (null: upstream's own path)."""
    names: dict[str, list[str]] = {}
    for module in modules:
        names.setdefault(module.treatment, []).append(module.name)
    return [{"formats": json.loads(treatment), "modules": of_it} for treatment, of_it in names.items()]


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 10` for these numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _groups(modules: Sequence[ResolvedModule]) -> Groups:
    """Modules that are treated alike in the same layers, by what they are called there."""
    layers_of: dict[tuple[str, str, int | None], list[int]] = {}  # (treatment, label, expert) -> layers
    experts_of: dict[str, set[int | None]] = {}
    for module in modules:
        label, expert = _label(module)
        experts_of.setdefault(label, set()).add(expert)
        layers = layers_of.setdefault((module.treatment, label, expert), [])
        if module.layer_idx is not None:
            layers.append(module.layer_idx)
    alike: dict[tuple[str, str, tuple[int, ...]], set[int | None]] = {}
    for (treatment, label, expert), layers in layers_of.items():
        alike.setdefault((treatment, label, tuple(sorted(layers))), set()).add(expert)
    result: Groups = {}
    for (treatment, label, layers_), experts in alike.items():
        known = ranges(expert for expert in experts if expert is not None)
        text = label if experts == experts_of[label] else label.replace(_ANY, known, 1)
        result.setdefault((treatment, layers_), []).append(text)
    return result


def _label(module: ResolvedModule) -> tuple[str, int | None]:
    """A module's name in its layer, short, `*` for the number of an expert; and that number."""
    if module.layer_idx is None:
        return module.name, None
    parts = module.name.split(".")
    number = next((place for place, part in enumerate(parts) if part == str(module.layer_idx)), -1)
    parts = [part for part in parts[number + 1 :] if part not in _SILENT_PARTS]
    expert = next((int(part) for part in parts if part.isdecimal()), None)
    return ".".join(_ANY if part.isdecimal() else part for part in parts), expert


def _operand_rows(formats: Mapping[str, Any] | None) -> list[tuple[str, ...]]:
    """The last columns of the table for one treatment, a row a format."""
    if formats is None:
        return [("all", UNQUANTIZED, _NO_RULE, _NO_RULE)]
    gemms = {gemm: operands for gemm, operands in formats.items() if gemm not in _RULES}
    everywhere: dict[str, set[str]] = {}
    for operands in gemms.values():
        for operand, name in operands.items():
            everywhere.setdefault(operand, set()).add(name)
    rows: dict[tuple[str, ...], dict[str, None]] = {}
    for gemm, operands in gemms.items():
        for operand, name in operands.items():
            text = operand if len(everywhere[operand]) == 1 else f"{gemm}.{operand}"
            rows.setdefault((name, *_rules(operand, name, formats)), {})[text] = None
    return [(" ".join(operands), *cells) for cells, operands in rows.items()]


def _rules(operand: str, name: str, formats: Mapping[str, Any]) -> tuple[str, str]:
    if name == UNQUANTIZED:
        return _NO_RULE, _NO_RULE
    scale_rule = formats["scale_rule"] if get_format(name).scale == "e8m0" else _NO_RULE
    scaled = operand in GRADIENT_OPERANDS and formats["grad_scale"] != NO_GRAD_SCALE
    return scale_rule, str(formats["grad_scale"]) if scaled else _NO_RULE
