"""TensorBoard's view of the captured tensors: amax, underflow, SQNR and exponents of each, iteration by iteration.

With `--tensorboard-dir` and `--tensor-save-mode statistics` or `both`, every rank writes what it holds as a run of its
own, `rank<r>`, in that directory:

    tensors/<module>/<tensor>/amax        largest magnitude
    tensors/<module>/<tensor>/exponents   histogram of floor(log2 |x|) of the elements that are not zero
    tensors/<module>/<tensor>/underflow   percent of these elements that the run's own format makes zero
    tensors/<module>/<tensor>/sqnr        signal to quantisation noise of that format, in dB

the last two of operands that are quantised. The micro-batches of an iteration are put together exactly; its step is the
number that the log calls it. All of it is done by the capture's writers, not by the training thread.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.quantscope.capture import CaptureSession
from megatron.quantscope.capture.metadata import BACKWARD, TensorMetadata
from megatron.quantscope.capture.site import Shown
from megatron.quantscope.formats import TensorStatistics, merge
from megatron.training.failure import TrainingError
from megatron.training.reporting.own_format import OperandDamage, measure_operand
from megatron.training.reporting.progress import make_writable

WEIGHT = "weight"
PERCENT = 100.0


@dataclass
class _Found:
    """What is known of one tensor of a module in one iteration."""

    statistics: TensorStatistics = field(default_factory=lambda: TensorStatistics(exponents={}))
    damage: OperandDamage | None = None


class TensorBoardRows:
    """A `RowListener` that writes event files.

    Args:
        writer: A `SummaryWriter`.
        interval: Iterations between writings.
    """

    def __init__(self, writer: Any, interval: int) -> None:
        self._writer = writer
        self._interval = interval
        self._lock = threading.Lock()
        self._found: dict[int, dict[str, _Found]] = defaultdict(lambda: defaultdict(_Found))

    def __str__(self) -> str:
        return "TensorBoard"

    def observe(self, tensor: torch.Tensor, shown: Shown) -> object:
        """What the format does to a CUDA tensor, still on its device."""
        if not self._wants(shown.iteration, shown.operation, shown.tensor_name):
            return None
        site = shown.site
        return measure_operand(tensor, site.layer_type, shown.tensor_name, site.formats, head_dim=site.head_dim)

    def row(
        self,
        metadata: TensorMetadata,
        statistics: Mapping[str, Any] | None,
        tensor: torch.Tensor | None,
        observed: object,
    ) -> None:
        """Add a row to what is known of its tensor."""
        iteration = metadata.iteration or 0
        if statistics is None or not self._wants(iteration, metadata.operation, metadata.tensor_name):
            return
        figures = observed
        if figures is None and tensor is not None:
            known = metadata.layer_type, metadata.tensor_name, metadata.formats
            figures = measure_operand(tensor, *known, head_dim=metadata.head_dim)
        damage = OperandDamage.of(figures) if isinstance(figures, torch.Tensor) else None
        with self._lock:
            found = self._found[iteration][f"tensors/{metadata.module}/{metadata.tensor_name}"]
            found.statistics = merge(found.statistics, TensorStatistics.from_json(statistics))
            if damage is not None:
                found.damage = damage + (found.damage or OperandDamage())

    def iteration(self, iteration: int) -> None:
        """Write what is known of an iteration."""
        with self._lock:
            known = self._found.pop(iteration, {})
        for tag, found in sorted(known.items()):
            self._write(tag, found, iteration + 1)
        self._writer.flush()

    def close(self) -> None:
        """Write what the queue still holds."""
        self._writer.close()

    def _wants(self, iteration: int, operation: str, tensor_name: str) -> bool:
        """The weight of the backward is that of the forward."""
        return (iteration + 1) % self._interval == 0 and (operation, tensor_name) != (BACKWARD, WEIGHT)

    def _write(self, tag: str, found: _Found, step: int) -> None:
        statistics, damage = found.statistics, found.damage
        if statistics.amax is not None:
            self._writer.add_scalar(f"{tag}/amax", statistics.amax, step)
        if statistics.exponents:
            self._writer.add_histogram_raw(f"{tag}/exponents", **exponent_histogram(statistics), global_step=step)
        if damage is None:
            return
        nonzero = statistics.finite - statistics.zero
        self._writer.add_scalar(f"{tag}/underflow", PERCENT * damage.underflow / max(1, nonzero), step)
        if math.isfinite(damage.sqnr_db):
            self._writer.add_scalar(f"{tag}/sqnr", damage.sqnr_db, step)


def exponent_histogram(statistics: TensorStatistics) -> dict[str, Any]:
    """Arguments of `add_histogram_raw`: one bucket a binade, from the smallest exponent to the largest."""
    counts = statistics.exponents
    exponents = range(min(counts), max(counts) + 1)
    return {
        "min": float(exponents[0]),
        "max": float(exponents[-1] + 1),
        "num": sum(counts.values()),
        "sum": float(sum(exponent * count for exponent, count in counts.items())),
        "sum_squares": float(sum(exponent**2 * count for exponent, count in counts.items())),
        "bucket_limits": [float(exponent + 1) for exponent in exponents],  # right edges
        "bucket_counts": [counts.get(exponent, 0) for exponent in exponents],
    }


def show_tensors(args: argparse.Namespace, session: CaptureSession, at_the_end: contextlib.ExitStack) -> None:
    """Write what `session` sees for TensorBoard, if that is asked for; to be called before its closing is arranged.

    Raises:
        TrainingError: when this rank's directory can not be written.
    """
    if not args.tensorboard_dir or not session.config.keeps_blocks:
        return
    from torch.utils.tensorboard import SummaryWriter

    directory = Path(args.tensorboard_dir) / f"rank{dist.get_rank()}"
    try:
        make_writable(directory)
    except OSError as error:
        raise TrainingError(f"--tensorboard-dir: {directory} can not be written: {error.strerror}") from None
    rows = TensorBoardRows(
        SummaryWriter(log_dir=str(directory), max_queue=args.tensorboard_queue_size), args.tensorboard_log_interval
    )
    at_the_end.callback(rows.close)
    session.listen(rows)
