"""What is known of a kept tensor beside its values: the fields of the metadata, and where each tensor stands in a GEMM.

A linear layer's row `grad_output` is an operand of two GEMMs, and an attention's `query` of one forward and one
backward; the field `gemm` names the GEMMs that a row was kept for, joined by `+`, by the names that `formats` uses:

    linear     fprop y = x wT      dgrad dx = dy w      wgrad dw = dyT x
    attention  scores s = q kT     context o = p v      dv = pT do     dp = do vT     dq = ds k     dk = dsT q
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

FORWARD, BACKWARD = OPERATIONS = ("forward", "backward")
PHASES = ("pre", "post", "unknown")  # high-precision operands, results, and what a direct call did not say
UNKNOWN = "unknown"
COMPLETE = "complete"  # the field `stage` of a tensor that no reduction over ranks is still to change
PARTIAL = "partial"  # of one rank's summand
REDUCED = "reduced"  # of a sum over ranks that the module has taken before it shows the tensor
PRE_NORM = "pre_norm"  # of what enters a norm that is one module with the GEMM: not the GEMM's own operand or result
DEQUANTIZED = "dequantized"  # of a weight that exists in a low-precision format only

# One step from this rank's tensor to the whole one, over the ranks of one axis of parallelism. "over" names the axis
# ("tp", "cp", "etp"); the rest says what puts the ranks' tensors together, in the order of their ranks along the axis:
#     {"over": "tp", "dim": -1}                       concatenate along a dimension
#     {"over": "tp", "dim": 0, "pieces": 2}           each holds its part of 2 pieces (gate and up): piece by piece
#     {"over": "cp", "dim": 0, "order": "zigzag"}     of 2 n chunks rank r holds chunks r and 2 n - 1 - r
#     {"over": "tp", "reduce": "sum"}                 add up: each is a summand
Split = Mapping[str, Any]
SAVE_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"

_GEMMS: dict[tuple[str, str, str], str] = {
    ("linear", "forward", "input"): "fprop",
    ("linear", "forward", "weight"): "fprop",
    ("linear", "forward", "output"): "fprop",
    ("linear", "backward", "grad_output"): "dgrad+wgrad",
    ("linear", "backward", "weight"): "dgrad",
    ("linear", "backward", "grad_input"): "dgrad",
    ("linear", "backward", "grad_weight"): "wgrad",
    ("attention", "forward", "query"): "scores",
    ("attention", "forward", "key"): "scores",
    ("attention", "forward", "value"): "context",
    ("attention", "forward", "attention_probs"): "context",
    ("attention", "forward", "output"): "context",
    ("attention", "backward", "grad_output"): "dv+dp",
    ("attention", "backward", "grad_query"): "dq",
    ("attention", "backward", "grad_key"): "dk",
    ("attention", "backward", "grad_value"): "dv",
}
TENSOR_NAMES = tuple(dict.fromkeys(name for _, _, name in _GEMMS))


def gemm_of(layer_type: str, operation: str, tensor_name: str) -> str | None:
    """The GEMMs that a tensor was kept for, such as "fprop" or "dgrad+wgrad"; None where the table has no such row."""
    return _GEMMS.get((layer_type, operation, tensor_name))


@dataclass(frozen=True, kw_only=True)
class TensorMetadata:
    """Every field that is kept with a tensor. None: not known, as for files that other tools wrote.

    Attributes:
        rank: Global rank.
        sample_idx: Global index of the micro-batch's first sample.
        iteration: Completed iterations before this one.
        layer_type: "linear", "attention", or what a direct call said.
        operation: "forward" or "backward".
        quant_type: Quant type of the run; the compute dtype where nothing is quantised.
        tensor_name: Role in the GEMM: input, weight, grad_output, ...
        layer_idx: Global layer from 0; None for a module outside the layers.
        phase: "pre" for high-precision operands, "post" for results.
        component: "linear", "FA" or what a direct call said.
        save_time: Local time, `YYYY-mm-dd HH:MM:SS`.
        module: Full module name, global layer numbers.
        gemm: GEMMs the row was kept for (see the module's docstring).
        sample_indices: Global indices of all samples of the micro-batch.
        document_ids: For each of these samples the documents of the data that it is made of; (): not known.
        micro_batch: Number of the micro-batch in its iteration, from 0.
        parallel: Rank and size along tp, pp, dp, cp, ep and etp.
        shard: How the whole tensor lies over ranks, one split after the other (see `Split`); (): it is all here.
        shape: Elements along each dimension.
        dtype: torch's name, such as "bfloat16".
        stage: "complete", or "partial" for one rank's summand before a reduction; of modules that are more than a GEMM
            also "reduced", "pre_norm" and "dequantized" (see the constants above).
        recomputed: Whether the module's forward is run again for the backward.
        grad_scale: What gradients are multiplied by, against their part in the gradient of the mean loss: data times
            context parallel ranks (whose mean is taken later), and the loss scale. Where the loss is divided by the
            number of tokens at the end (--calculate-per-token-loss), the loss scale alone, against the summed loss.
        formats: What each operand of the module's GEMMs was quantised to.
        head_dim: Of attention: the features of one head, so that blocks along them do not cross heads in the rows
            that hold all heads side by side.
        softmax_scale: Of attention: what scores are multiplied by before the softmax.
        routed: Of an expert of a mixture: the rows of its tensors are the tokens that the router sent it, in the order
            of the dispatcher, from the micro-batches of all ranks that share the experts; not positions of
            `sample_indices`, which are this rank's.
        run_id: The run that wrote it.
        extra: Further fields that a direct call of the saver added.
    """

    rank: int | None = None
    sample_idx: int | None = None
    iteration: int | None = None
    layer_type: str
    operation: str
    quant_type: str
    tensor_name: str
    layer_idx: int | None = None
    phase: str = UNKNOWN
    component: str = UNKNOWN
    save_time: str | None = None
    module: str | None = None
    gemm: str | None = None
    sample_indices: tuple[int, ...] = ()
    document_ids: tuple[tuple[int, ...], ...] = ()
    micro_batch: int | None = None
    parallel: dict[str, int] = field(default_factory=dict)
    shard: tuple[Split, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    stage: str | None = None
    recomputed: bool = False
    grad_scale: float = 1.0
    formats: dict[str, Any] = field(default_factory=dict)
    head_dim: int | None = None
    softmax_scale: float | None = None
    routed: bool = False
    run_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Built-in types only, `extra` spread among the other fields; what files and manifests hold."""
        mine = vars(self)
        values = {name: mine[name] for name in FIELDS}
        for name in _SEQUENCES:
            values[name] = list(values[name]) if values[name] is not None else None
        values["shard"] = [dict(split) for split in self.shard]
        values["document_ids"] = [list(documents) for documents in self.document_ids]
        return values | self.extra


FIELDS = tuple(field.name for field in fields(TensorMetadata) if field.name != "extra")
_SEQUENCES = ("sample_indices", "shape")


def _splits(shard: Any) -> tuple[Split, ...]:
    """The splits of a row; schema 1 had one as a dict, or None."""
    if isinstance(shard, dict):
        return (shard,)
    return tuple(shard or ())


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "sample_indices": tuple,
    "shape": tuple,
    "shard": _splits,
    "document_ids": lambda ids: tuple(tuple(documents) for documents in ids),
}


def metadata_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `TensorMetadata` out of a row that `to_dict` made; unknown keys are left out."""
    values = {name: row[name] for name in FIELDS if name in row}
    for name, convert in _CONVERTED.items():
        if name in values and (values[name] is not None or name == "shard"):
            values[name] = convert(values[name])
    return values
