"""Log lines in Megatron-LM's form, and the same numbers as TensorBoard scalars.

Both come from one record of an iteration. What a line holds is a table, so that a program that reads lines
(the drivers look for `lm loss: X`) and one that reads scalars find the same names in every run.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.timers import Timers
from megatron.training.console import print_rank_last
from megatron.training.failure import UsageError
from megatron.training.reporting.throughput import teraflops_per_rank
from megatron.training.reporting.timing import log_times, write_times

MS = 1000.0
LARGEST_EXPONENT = 20  # of a perplexity, as Megatron-LM
PROGRESS_FILE = "progress.txt"
CUDA_MEMORY = {
    "mem-reserved-bytes": "reserved_bytes.all.current",
    "mem-allocated-bytes": "allocated_bytes.all.current",
    "mem-max-allocated-bytes": "allocated_bytes.all.peak",
    "mem-allocated-count": "allocation.all.current",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one iteration came to.

    Attributes:
        iteration: Its number, from 1.
        consumed_samples: Samples read for training by its end.
        seconds: Its duration.
        learning_rate: Of its step.
        global_batch_size: Its samples.
        loss: Mean over its tokens.
        loss_scale: 1 without loss scaling.
        grad_norm: Before clipping; None when nothing is clipped.
        zeros: Zeros in the gradient; None when not counted.
        skipped: The step was left out, the loss scale being too large.
        params_norm: Of all parameters, after the step; None when not asked for.
        router_losses: Those of a mixture's router, by name, without their coefficients.
    """

    iteration: int
    consumed_samples: int
    seconds: float
    learning_rate: float
    global_batch_size: int
    loss: float
    loss_scale: float
    grad_norm: float | None
    zeros: float | None
    skipped: bool
    params_norm: float | None = None
    router_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass
class ProgressLog:
    """Prints and writes the reports of a run; opens TensorBoard's file on the last rank, which holds the loss."""

    args: argparse.Namespace
    timers: Timers | None = None
    _since_line: list[Report] = field(default_factory=list)
    _evaluations: set[tuple[str, int]] = field(default_factory=set)
    _writer: Any = None

    def __post_init__(self) -> None:
        self.note("Starting job")
        if not self.args.tensorboard_dir:
            return
        if dist.get_rank() == dist.get_world_size() - 1:
            self._writer = open_tensorboard(self.args)
        else:
            require_tensorboard(self.args)  # what is wrong is found out by all ranks alike, and said by the first

    def add(self, report: Report, *, last: bool) -> None:
        """Take the report of an iteration; print a line every --log-interval iterations and for the last one."""
        self._since_line.append(report)
        if report.iteration % self.args.log_interval == 0 or last:
            print_rank_last(log_line(self.args, self._since_line))
            self._add_times(report.iteration)
            self._since_line.clear()
        if self._writer is not None and report.iteration % self.args.tensorboard_log_interval == 0:
            for name, value in scalars(self.args, report).items():
                self._writer.add_scalar(name, value, report.iteration)
            self._writer.add_scalar("lm loss vs samples", report.loss, report.consumed_samples)

    def add_evaluation(self, name: str, iteration: int, loss: float) -> None:
        """Print and write the loss of an evaluation on the `name` data."""
        self._evaluations.add((name, iteration))
        perplexity = math.exp(min(LARGEST_EXPONENT, loss))
        line = f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
        print_rank_last("-" * len(line) + "\n" + line + "\n" + "-" * len(line))
        if self._writer is not None:
            self._writer.add_scalar(f"lm loss {name}", loss, iteration)
            self._writer.add_scalar(f"lm loss {name} ppl", perplexity, iteration)

    def has_evaluation(self, name: str, iteration: int) -> bool:
        """Whether the loss on the `name` data is known for the weights after `iteration`."""
        return (name, iteration) in self._evaluations

    def note(self, event: str, iteration: int | None = None) -> None:
        """With --log-progress, append a line about the job to `progress.txt` in --save, on the first rank."""
        if not (self.args.log_progress and self.args.save) or dist.get_rank() != 0:
            return
        at = "" if iteration is None else f"\tIteration: {iteration}"
        job = f"Job ID: {os.environ.get('SLURM_JOB_ID', '')}\t# GPUs: {self.args.world_size}"
        with (Path(self.args.save) / PROGRESS_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\t{job}\t{event}{at}\n")

    def _add_times(self, iteration: int) -> None:
        if self.timers is None:
            return
        if self.args.log_timers_to_tensorboard:
            write_times(self.args, self.timers, self._writer, iteration, len(self._since_line))
        log_times(self.args, self.timers, len(self._since_line))

    def close(self) -> None:
        """Write what TensorBoard's queue still holds."""
        if self._writer is not None:
            self._writer.close()


def log_line(args: argparse.Namespace, reports: list[Report]) -> str:
    """One line over `reports`, the iterations since the line before: mean losses and time, the rest of the last."""
    report = reports[-1]
    counted = [each for each in reports if math.isfinite(each.loss) and not each.skipped] or [report]
    seconds = sum(each.seconds for each in reports) / len(reports)
    total = args.train_iters
    rate = teraflops_per_rank(args, report.global_batch_size, seconds)
    parts = (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {report.iteration:8d}/{total:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * MS:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {rate:.1f}" if args.log_throughput else None,
        f"learning rate: {report.learning_rate:.6E}",
        f"global batch size: {report.global_batch_size:5d}",
        f"lm loss: {_figure(fmean(each.loss for each in counted))}",
        *(f"{name}: {_figure(fmean(each.router_losses[name] for each in counted))}" for name in report.router_losses),
        f"loss scale: {report.loss_scale:.1f}",
        None if report.grad_norm is None else f"grad norm: {report.grad_norm:.3f}",
        None if report.zeros is None else f"num zeros: {report.zeros:.0f}",
        None if report.params_norm is None else f"params norm: {report.params_norm:.3f}",
        f"number of skipped iterations: {sum(each.skipped for each in reports):3d}",
        f"number of nan iterations: {sum(not math.isfinite(each.loss) for each in reports):3d} |",
    )
    return " | ".join(part for part in parts if part is not None)


def _figure(value: float) -> str:
    """As Megatron-LM prints losses; nan and inf in lower case."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)


def scalars(args: argparse.Namespace, report: Report) -> dict[str, float]:
    """TensorBoard's scalars of one iteration, under Megatron-LM's names."""
    named = {
        "lm loss": report.loss,
        **report.router_losses,
        "learning-rate": report.learning_rate,
        "batch-size": report.global_batch_size,
        "loss-scale": report.loss_scale if args.log_loss_scale_to_tensorboard else None,
        "grad-norm": report.grad_norm,
        "num-zeros": report.zeros,
        "params-norm": report.params_norm,
        "world-size": args.world_size if args.log_world_size_to_tensorboard else None,
        "iteration-time": report.seconds,
        "throughput": teraflops_per_rank(args, report.global_batch_size, report.seconds),
    }
    memory = memory_figures() if args.log_memory_to_tensorboard else {}
    return {name: float(value) for name, value in (named | memory).items() if value is not None}


def memory_figures() -> dict[str, float]:
    """Memory of the GPU, under Megatron-LM's names; without GPU, what of the process is in memory."""
    if torch.cuda.is_available():
        found = torch.cuda.memory_stats()
        return {name: float(found[key]) for name, key in CUDA_MEMORY.items()}
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {"mem-resident-bytes": float(pages * os.sysconf("SC_PAGE_SIZE"))}


def open_tensorboard(args: argparse.Namespace) -> Any:
    """A writer into --tensorboard-dir.

    Raises:
        UsageError: when the package is missing or the directory can not be written.
    """
    require_tensorboard(args)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)


def require_tensorboard(args: argparse.Namespace) -> None:
    """See that TensorBoard can write into --tensorboard-dir; leaves nothing but the directory.

    Raises:
        UsageError: when it can not, see `open_tensorboard`.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise UsageError("--tensorboard-dir needs the package tensorboard") from None
    try:
        make_writable(Path(args.tensorboard_dir))
    except OSError as error:
        raise UsageError(f"--tensorboard-dir: {args.tensorboard_dir} can not be written: {error.strerror}") from None


def make_writable(directory: Path) -> None:
    """Make `directory`, if it is not there, and see that a file can be written into it.

    Raises:
        OSError: when it can not.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()
