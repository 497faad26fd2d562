"""What every format would do to the tensors of a capture, GEMM by GEMM, as one long table; and block by block.

An operand goes into up to two GEMMs, which cut it into blocks along different axes. So the same format may do to the
same tensor one thing in fprop and another in wgrad, and each is a row. Formats without blocks do the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from megatron.quantscope.analysis.aggregate import merged, treatments_of
from megatron.quantscope.analysis.format_errors import USE_SUFFIXES, Treatment, as_scaled
from megatron.quantscope.analysis.roles import Role
from megatron.quantscope.analysis.summary import as_measurable
from megatron.quantscope.formats import BlockFigures, fake_quantize, measure, measure_format

if TYPE_CHECKING:
    import pandas

IDENTITY = (
    "quant_type", "run_id", "iteration", "micro_batch", "sample_idx", "rank", "layer_idx", "module", "site", "symbol",
    "family", "operation", "tensor_name",
)  # fmt: skip
"""The columns that say which tensor a row is about."""
FIGURES = (
    "sqnr_db", "relative_error", "underflow_percent", "saturated_percent", "lost_percent", "dead_blocks",
)  # fmt: skip
_TENSOR, _GEMM = "tensor", "gemm"


def what_if(summary: pandas.DataFrame, by: Sequence[str] | None = None) -> pandas.DataFrame:
    """One row a tensor or group, GEMM, format and scale rule.

    Args:
        summary: Rows of the summary table.
        by: Columns whose values make a group; None: every tensor is one.

    Returns:
        The columns `by`, or `IDENTITY`; `gemm`, null for tensors that go into none, whose blocks run along the last
        axis; `format`, `scale_rule` and `scaled` as of a `Treatment`; and `FIGURES` (`aggregate.merged` defines them).
    """
    import pandas

    rows = summary.assign(**{_TENSOR: range(len(summary))})
    keys = [_TENSOR] if by is None else list(by)
    columns = [*(IDENTITY if by is None else by), _GEMM, "format", "scale_rule", "scaled", *FIGURES]
    parts = [part for use in range(len(USE_SUFFIXES)) for part in _parts_of(rows, use, keys)]
    if not parts:
        return pandas.DataFrame(columns=columns)
    table = pandas.concat(parts, ignore_index=True).sort_values(keys, kind="stable", ignore_index=True)
    if by is None:
        table = table.join(rows.set_index(_TENSOR)[list(IDENTITY)], on=_TENSOR)
    return table[columns]


def _parts_of(rows: pandas.DataFrame, use: int, keys: Sequence[str]) -> Iterator[pandas.DataFrame]:
    """The long table's rows of one use, treatment by treatment."""
    found = [Treatment.named(name) for name in treatments_of(rows)]
    tried = [treatment for treatment in found if treatment.use == use or not treatment.record.block]
    others = tuple(f"{treatment.name}." for treatment in found if treatment not in tried)
    mine = rows.loc[[len(gemms) > use or use == 0 for gemms in rows["gemms"]]]
    mine = mine[[column for column in mine if not column.startswith(others)]]
    mine = mine.assign(**{_GEMM: [gemms[use] if len(gemms) else None for gemms in mine["gemms"]]})
    groups = merged(mine, [*keys, _GEMM])
    for treatment in tried:
        of_treatment = {f"{treatment.name}.{figure}": figure for figure in FIGURES}
        known = groups.loc[groups[f"{treatment.name}.error_squares"].notna(), list(of_treatment)]
        named = {"format": treatment.format, "scale_rule": treatment.scale_rule, "scaled": treatment.scaled}
        yield known.rename(columns=of_treatment).assign(**named).reset_index()


def as_quantized(tensor: Tensor, role: Role, treatment: Treatment, head_dim: int | None = None) -> Tensor:
    """An operand as training with a treatment hands it to its GEMM, bit for bit; arguments as of `block_map`.

    Of formats with a scale for the whole tensor this holds for tensors that training has whole: it sees attention
    probabilities head by head, and takes a scale for each.
    """
    x, axis = _cut(tensor, role, treatment, head_dim)
    if treatment.record.is_identity_for(x.dtype):
        return x
    scaled, scale = as_scaled(x, treatment, measure(x)) if treatment.scaled else (x, 1.0)
    result = fake_quantize(scaled, treatment.format, axis=axis, scale_rule=treatment.scale_rule)
    return (result / scale).to(x.dtype) if scale != 1.0 else result


def block_map(tensor: Tensor, role: Role, treatment: Treatment, head_dim: int | None = None) -> BlockFigures:
    """What a treatment does to every single block of a tensor.

    Args:
        tensor: As captured, floating-point.
        role: What it is to its GEMMs.
        treatment: What to try, along the use that it says.
        head_dim: Features of an attention head, if they are known.

    Returns:
        Figures in the units of the tensor, of the shape of the operand as its GEMM is given it (`Use.view`) with the
        axis of the blocks replaced by their number. Blocks of formats without any are 32 elements.

    Raises:
        ValueError: The tensor has no such use.
    """
    x, axis = _cut(tensor, role, treatment, head_dim)
    scaled, scale = as_scaled(x, treatment, measure(x)) if treatment.scaled else (x, 1.0)
    found = measure_format(scaled, treatment.format, axis=axis, scale_rule=treatment.scale_rule, blocks=True).blocks
    assert found is not None
    squares = scale * scale
    return replace(found, amax=found.amax / scale, error=found.error / squares, signal=found.signal / squares)


def _cut(tensor: Tensor, role: Role, treatment: Treatment, head_dim: int | None) -> tuple[Tensor, int]:
    if treatment.use >= len(role.cuts):
        raise ValueError(f"{treatment.name} is of use {treatment.use + 1}, and {role.title} has {len(role.cuts)}")
    return role.cuts[treatment.use].view(as_measurable(tensor), head_dim)
