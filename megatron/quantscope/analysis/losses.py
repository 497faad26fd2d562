"""Losses of the captured iterations, from the commit records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.quantscope.analysis.comparison.runs import Run

LOSS = "lm loss"


def losses_by_type(
    commits: Mapping[str, Mapping[int, Mapping[str, float]]], types: Sequence[str]
) -> dict[str, dict[int, float]]:
    """Quant type -> iteration -> loss, in the order of `types`; types without a finite loss are left out."""
    found = {
        name: {
            iteration: scalars[LOSS]
            for iteration, scalars in commits.get(name, {}).items()
            if math.isfinite(scalars.get(LOSS, math.nan))
        }
        for name in types
    }
    return {name: losses for name, losses in found.items() if losses}


def losses_of_runs(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Label -> iteration -> loss of runs that are compared; runs without a finite loss are left out."""
    return losses_by_type({run.label: run.commits for run in runs}, [run.label for run in runs])


def loss_differences(losses: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, dict[int, float]]:
    """Quant type -> iteration -> difference to the baseline's loss in percent, where the baseline has one."""
    reference = losses.get(baseline, {})
    return {
        name: {
            iteration: 100 * (loss / reference[iteration] - 1)
            for iteration, loss in by_iteration.items()
            if reference.get(iteration)
        }
        for name, by_iteration in losses.items()
    }
