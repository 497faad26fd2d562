"""What takes the time of an iteration: megatron-core's own timers, read out for the log and for TensorBoard.

With `--timing-log-level` 1 and 2 megatron-core times its schedule, the reduction of gradients and the optimizer; ranks
wait for each other before a time of level 1 is taken (not with `--no-barrier-with-level-1-timing`). Level 0 costs
nothing: there are no timers.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.timers import Timers
from megatron.training.console import print_rank_last

OPTIMIZER = "optimizer"
# Names of megatron-core. A fixed list: ranks exchange the times by place, and not every stage has every timer.
LEVEL_1 = (
    "forward-backward",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "all-grads-sync",
    "params-all-gather",
    OPTIMIZER,
)
LEVEL_2 = (
    "forward-compute",
    "backward-compute",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
)
NAMES = {0: (), 1: LEVEL_1, 2: LEVEL_1 + LEVEL_2}


def attach_timers(args: argparse.Namespace, model: list[Any], optimizer: Any) -> Timers | None:
    """Give the configurations of the model and of its optimizer, if it has one, the run's timers; None at level 0."""
    if not args.timing_log_level:
        return None
    timers = Timers(args.timing_log_level, args.timing_log_option)
    optimizers = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    for config in [part.config for part in [*model, *optimizers]]:
        config.timers = timers
        config.barrier_with_L1_time = args.barrier_with_L1_time
    return timers


@contextlib.contextmanager
def timed(config: Any, name: str, level: int = 1) -> Iterator[None]:
    """Time the block by the configuration's timers, if it has any."""
    if config.timers is None:
        yield
        return
    timer = config.timers(name, log_level=level)
    timer.start(barrier=level == 1 and config.barrier_with_L1_time)
    yield
    timer.stop()


@contextlib.contextmanager
def untimed(config: Any) -> Iterator[None]:
    """Leave the block out of all times: an evaluation is no part of an iteration."""
    timers, config.timers = config.timers, None
    try:
        yield
    finally:
        config.timers = timers


def log_times(args: argparse.Namespace, timers: Timers, iterations: int) -> None:
    """Print the mean times of the `iterations` since the last call, on the last rank, and start anew (collective)."""
    lines = timers.get_all_timers_string(list(NAMES[args.timing_log_level]), normalizer=iterations)
    if lines is not None:
        print_rank_last(lines)


def write_times(args: argparse.Namespace, timers: Timers, writer: Any, iteration: int, iterations: int) -> None:
    """Write them for TensorBoard, in seconds, as `<name>-time`; call it before `log_times` (collective)."""
    timers.write(list(NAMES[args.timing_log_level]), writer, iteration, normalizer=iterations, reset=False)
