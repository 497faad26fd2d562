"""What a collection says before it starts and after it ends: how much there will be, and what came of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from script.data.command_line import InputError
from script.driver.display import Display, size
from script.driver.training import Job, Outcome

BYTES_PER_GB = 10**9
COLUMNS = ("type", "iterations", "micro-\nbatches", "rows", "files", "bytes", "loss", "seconds", "result")
NO_VALUE = "-"


def announce(jobs: Sequence[Job], display: Display) -> None:
    """Print how many files and bytes a micro-batch, and the whole, will take."""
    plan, args = jobs[0].plan, jobs[0].arguments
    at_most = "at most " if jobs[0].filtered else ""
    display.say(
        f"a micro-batch ({plan.tokens} tokens, {args.num_layers} layers): {at_most}{plan.first.files} files, "
        f"{size(plan.first.payload)} of tensors"
    )
    for ready in jobs:
        total = ready.plan.total
        display.say(
            f"{ready.quant_type}: {ready.plan.iterations} x {ready.plan.micro_batches} micro-batches: {at_most}"
            f"{total.rows} rows, {total.files} files, {size(total.payload)} into {ready.folder}"
        )
    if jobs[0].plan.total.on_disk > args.tensor_budget_gb * BYTES_PER_GB:
        display.say(
            f"collecting will end at {args.tensor_budget_gb:g} GB: raise --tensor-budget-gb (after --) for more"
        )


def require_space(jobs: Sequence[Job]) -> None:
    """Refuse to start what can not fit on the disk.

    Raises:
        InputError: It does not fit.
    """
    if jobs[0].filtered:  # then the plan is an upper bound, which says nothing
        return
    budget = jobs[0].arguments.tensor_budget_gb * BYTES_PER_GB
    needed = sum(min(ready.plan.total.on_disk, budget) for ready in jobs)
    folder = next(path for path in (jobs[0].folder, *jobs[0].folder.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder} has {size(free)} free and {size(needed)} are needed; give another --tensor-dir, or keep less "
            "(--control-iter, or --tensor-filter after --)"
        )


def summarise(outcomes: Sequence[Outcome], jobs: Sequence[Job], display: Display) -> None:
    """Print the table of what was collected."""
    display.table(
        f"collected into {jobs[0].folder.parent}",
        COLUMNS,
        [
            (
                outcome.quant_type,
                str(outcome.collected.iterations),
                str(outcome.collected.micro_batches),
                str(outcome.collected.rows),
                str(outcome.collected.files),
                size(outcome.collected.file_bytes),
                _loss(outcome),
                f"{outcome.seconds:.1f}",
                "failed" if outcome.failure else "ok",
            )
            for outcome in outcomes
        ],
    )


def _loss(outcome: Outcome) -> str:
    loss = outcome.collected.loss
    return NO_VALUE if loss is None else f"{loss:.3f}"
