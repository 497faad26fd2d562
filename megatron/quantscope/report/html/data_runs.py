"""The runs that were captured: what they are, made by which versions, and their losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron.quantscope.analysis.losses import loss_differences, losses_by_type
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.html.encode import number, numbers
from megatron.quantscope.report.style import format_color, format_title

Part = dict[str, Any]

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")  # runs of one type, in turn
_ARGUMENTS = {
    "layers": "num_layers",
    "hidden size": "hidden_size",
    "FFN size": "ffn_hidden_size",
    "attention heads": "num_attention_heads",
    "query groups": "num_query_groups",
    "experts": "num_experts",
    "vocabulary": "padded_vocab_size",
    "sequence length": "seq_length",
    "micro-batch": "micro_batch_size",
    "global batch": "global_batch_size",
    "tensor parallel": "tensor_model_parallel_size",
    "pipeline parallel": "pipeline_model_parallel_size",
    "context parallel": "context_parallel_size",
    "data parallel": "data_parallel_size",
    "learning rate": "lr",
    "checkpoint": "load",
    "data": "data_path",
}
_UNSAID_IF_ONE = {"tensor parallel", "pipeline parallel", "context parallel", "data parallel"}


def runs(study: Study) -> list[Part]:
    """The contract's `runs`, the baseline first."""
    losses = losses_by_type(study.commits, study.types)
    seen: Counter[str] = Counter()
    result = []
    for name in study.types:
        kind = name.rpartition("/")[2]
        result.append(
            {
                "type": name,
                "title": name if "/" in name else format_title(name),
                "color": format_color(kind),
                "dash": _DASHES[seen[kind] % len(_DASHES)],
                **_record(study.run_info.get(name, {})),
                **_sizes(study, name),
                "losses": [[iteration, number(loss)] for iteration, loss in sorted(losses.get(name, {}).items())],
            }
        )
        seen[kind] += 1
    return result


def losses(study: Study) -> Part | None:
    """The contract's `losses`; None where no run tells one. Without a loss of the baseline there are no differences."""
    found = losses_by_type(study.commits, study.types)
    if not found:
        return None
    differences = loss_differences(found, study.types[0]) if study.types[0] in found else {}
    return {
        "baseline": study.types[0],
        "runs": {
            name: {
                "iterations": sorted(of_run),
                "loss": numbers(of_run[iteration] for iteration in sorted(of_run)),
                "difference_percent": [
                    number(differences.get(name, {}).get(iteration)) for iteration in sorted(of_run)
                ],
            }
            for name, of_run in found.items()
        },
    }


def _record(info: Mapping[str, Any]) -> Part:
    """What run.json says; it may be of any make, so nothing in it is taken for granted."""
    command, versions = info.get("command"), info.get("versions")
    return {
        "run_id": _text(info.get("run_id")),
        "created": _text(info.get("created")),
        "command": [str(word) for word in command] if isinstance(command, list) else None,
        "model": _model(info),
        "versions": {str(name): str(text) for name, text in versions.items()} if isinstance(versions, dict) else {},
    }


def _model(info: Mapping[str, Any]) -> dict[str, str]:
    arguments = info.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    found = {label: _value(arguments.get(name)) for label, name in _ARGUMENTS.items()}
    found |= _recipe(info.get("quantization"))
    found |= {"compute dtype": _value(info.get("compute_dtype")), "device": _value(info.get("device"))}
    return {
        label: text
        for label, text in found.items()
        if text is not None and not (label in _UNSAID_IF_ONE and text == "1")
    }


def _recipe(quantization: Any) -> dict[str, str | None]:
    """The preset or the recipe file that says what is quantised, by its name."""
    given = quantization if isinstance(quantization, dict) else {}
    named = {label: given.get(label) for label in ("preset", "recipe")}
    return {label: _text(each.get("name")) for label, each in named.items() if isinstance(each, dict)}


def _sizes(study: Study, name: str) -> Part:
    rows = study.summary[study.summary["quant_type"] == name]
    return {
        "rows": int((study.index["quant_type"] == name).sum()),
        "files": len(rows),
        "bytes": int(rows["bytes"].sum()),
        "elements": int(rows["count"].sum()),
        "ranks": int(rows["rank"].nunique()),
        "iterations": int(rows["iteration"].nunique()),
    }


def _value(value: Any) -> str | None:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    return _text(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
