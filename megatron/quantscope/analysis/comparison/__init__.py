"""Captures of the same samples side by side: formats, commits or layouts, tensor by tensor.

    runs = runs_of([open_capture("a"), open_capture("b")])       # runs[0] is the baseline
    with worker_pool(2) as workers:
        table = compare(runs, workers, log=(log := ComparisonLog()))
    for parting in partings(table): print(parting.text)

A row of the table is a tensor of a run and its partner in the baseline run (`table.COLUMNS`). What a run shows counts
everything that happened before the tensor, not only its own quantisation.
"""

from megatron.quantscope.analysis.comparison.growth import Growth, Step, growths, steps
from megatron.quantscope.analysis.comparison.pairs import Pair, Pairing, pair_runs
from megatron.quantscope.analysis.comparison.parting import (
    BEGINS_TO_PART_DB,
    PARTED_DB,
    Parting,
    partings,
    worst,
)
from megatron.quantscope.analysis.comparison.runs import Run, runs_of, type_of_label
from megatron.quantscope.analysis.comparison.table import COLUMNS, ComparisonLog, compare, compare_pairs

__all__ = [
    "BEGINS_TO_PART_DB",
    "COLUMNS",
    "PARTED_DB",
    "ComparisonLog",
    "Growth",
    "Pair",
    "Pairing",
    "Parting",
    "Run",
    "Step",
    "compare",
    "compare_pairs",
    "growths",
    "pair_runs",
    "partings",
    "runs_of",
    "steps",
    "type_of_label",
    "worst",
]
