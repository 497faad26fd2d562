"""One run of the trainer, from its command line to what it collected.

The run is followed by what it does: lines it prints and tensors it keeps are progress. One that makes none for the
stall time is stopped, since a hung collective or a dead disk would otherwise wait for ever.
"""

from __future__ import annotations

import os
import re
import signal
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from megatron.quantscope.flags.quantization import UNQUANTIZED
from megatron.quantscope.gemm.recipe import QuantConfig
from script.driver.display import Display, size
from script.driver.options import Options
from script.driver.plan import Plan, plan
from script.driver.process import SIGNAL_EXIT_BASE, RunningProgram
from script.driver.trainer import Inputs, arguments, flags, launch
from script.driver.watch import RUNS_FOLDER, Collected, ManifestWatch

LOOK_SECONDS = 0.5
KEPT_LINES = 200  # of the trainer's last words, to find its complaint in
LOG_NAME = "train.log"
ITERATION_LINE = re.compile(
    r"iteration\s+(?P<number>\d+)/.*\(ms\): (?P<ms>\S+).*lm loss: (?P<loss>\S+)(.*grad norm: (?P<norm>\S+))?"
)
TORCHRUN_REPORT = "torch/distributed/elastic"  # in the first line of what torchrun adds when a rank has failed
COMPLAINT_LINE = re.compile(r"(error|exception|killed|refused|not allowed|cannot|can not)\b", re.IGNORECASE)
UNQUANTIZED_FOLDER = {(True, False): "bf16", (False, True): "fp16", (False, False): "fp32"}  # by (bf16, fp16)
OK = 0
FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is ready to start.

    Attributes:
        quant_type: Its quantisation type; of a preset or a recipe what captures are called.
        command: What starts the trainer.
        arguments: The trainer's, as it will read them.
        folder: Where its tensors go.
        plan: How many there will be.
        filtered: Whether a filter will keep fewer.
    """

    quant_type: str
    command: Sequence[str]
    arguments: Namespace
    folder: Path
    plan: Plan
    filtered: bool


@dataclass(kw_only=True)
class Outcome:
    """What came of a run: what was collected, the seconds it took, and why it failed (None: it did not)."""

    quant_type: str
    collected: Collected = field(default_factory=Collected)
    seconds: float = 0.0
    failure: str | None = None
    exit_code: int = OK


def job(options: Options, quant_type: str, inputs: Inputs) -> Job:
    """Check the trainer's command line for one type and work out what it will keep.

    Raises:
        BadInput: The trainer would refuse it.
    """
    trainer_flags = flags(options, quant_type, inputs)
    read = arguments(options, trainer_flags)
    label = QuantConfig.from_namespace(read).label
    folder = label if label != UNQUANTIZED else UNQUANTIZED_FOLDER[read.bf16, read.fp16]
    iterations = min(read.control_iter or read.train_iters, read.train_iters)
    return Job(
        quant_type=quant_type if read.quant_recipe is read.quant_preset is None else label,
        command=launch(options, trainer_flags),
        arguments=read,
        folder=Path(read.tensor_save_dir).absolute() / folder,
        plan=plan(read, iterations=iterations, micro_batches=read.collect_micro_batches),
        filtered=bool(read.tensor_filter),
    )


def run(ready: Job, options: Options, display: Display) -> Outcome:
    """Run the trainer until it ends or stalls, showing what it keeps.

    Returns:
        What was collected, also when it failed.

    Raises:
        OSError: The folder can not be written.
    """
    runs = ready.folder / RUNS_FOLDER
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{time.strftime('train_%Y%m%d_%H%M%S')}_{os.getpid()}.log"
    watch = ManifestWatch(ready.folder)
    outcome = Outcome(quant_type=ready.quant_type, collected=watch.collected)
    began = time.monotonic()
    last_lines: deque[str] = deque(maxlen=KEPT_LINES)
    with display.following(f"{ready.quant_type}: starting"), RunningProgram(ready.command, log=log) as program:
        stalled = _follow(program, watch, last_lines, options, _Line(ready, began, display))
        outcome.exit_code = FAILED if stalled else program.returncode
    watch.poll()
    outcome.seconds = time.monotonic() - began
    log = _file_log(log, watch)
    outcome.failure = _failure(ready, outcome, stalled, options, last_lines)
    if outcome.failure is not None:
        outcome.exit_code = outcome.exit_code or FAILED
        outcome.failure += f" (log: {log})"
    return outcome


@dataclass
class _Line:
    """The line that follows a run."""

    ready: Job
    began: float
    display: Display

    def show(self, collected: Collected) -> None:
        seconds = time.monotonic() - self.began
        planned = self.ready.plan.total.files
        self.display.follow(
            f"{self.ready.quant_type}: {collected.files}/{planned} files, {size(collected.file_bytes)}, "
            f"{size(collected.file_bytes / seconds)}/s, {seconds:.0f} s"
        )


def rehearse(ready: Job, display: Display) -> int:
    """Run a trainer that writes nothing, and let it speak for itself.

    Returns:
        Its exit code.
    """
    display.say(f"{ready.quant_type}:")
    with RunningProgram(ready.command) as program:
        while program.lines(LOOK_SECONDS) is not None:
            pass
        return program.returncode


def _follow(
    program: RunningProgram, watch: ManifestWatch, last_lines: deque[str], options: Options, line: _Line
) -> bool:
    """Follow a program until it ends; True if it was given up for making no progress."""
    last_progress = time.monotonic()
    tell_all = options.verbose or line.ready.arguments.tensor_check_interference  # whose verdict is what it is for
    while (lines := program.lines(LOOK_SECONDS)) is not None:
        last_lines.extend(lines)
        for text in lines:
            if said := text if tell_all else iteration(text):
                line.display.say(f"{line.ready.quant_type}: {said}")
        if watch.poll() or lines:
            last_progress = time.monotonic()
        elif time.monotonic() - last_progress > options.stall_timeout:
            return True
        line.show(watch.collected)
    return False


def _failure(ready: Job, outcome: Outcome, stalled: bool, options: Options, last_lines: Sequence[str]) -> str | None:
    """Why a run has to be called a failure, or None."""
    collected, wanted = outcome.collected, ready.arguments.control_iter
    if stalled:
        return f"no progress for {options.stall_timeout:g} s: stopped (--stall-timeout)"
    if outcome.exit_code:
        return f"the trainer {_ending(outcome.exit_code)}: {complaint(last_lines)}"
    if collected.stopped:
        return f"collecting ended early: {collected.stopped[0]}"
    if collected.iterations < wanted:
        return f"{collected.iterations} of {wanted} iterations were collected"
    if not collected.rows:
        return "nothing was collected"
    return None


def _ending(exit_code: int) -> str:
    number = exit_code - SIGNAL_EXIT_BASE
    if number in {known.value for known in signal.Signals}:
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {exit_code}"


def iteration(line: str) -> str:
    """What a line of the trainer's log says of an iteration, in short; nothing if it is another line."""
    match = ITERATION_LINE.search(line)
    if match is None:
        return ""
    norm = f", grad norm {float(match['norm']):.3f}" if match["norm"] else ""
    return f"iteration {match['number']}: lm loss {float(match['loss']):.3f}{norm}, {float(match['ms']) / 1000:.1f} s"


def complaint(lines: Sequence[str]) -> str:
    """The line of a failed program's last words that says why: the last that reads like a complaint, else the last."""
    spoken = [line.strip() for line in takewhile(lambda line: TORCHRUN_REPORT not in line, lines) if line.strip()]
    return next((line for line in reversed(spoken) if COMPLAINT_LINE.search(line)), (spoken or ["it said nothing"])[-1])


def _file_log(log: Path, watch: ManifestWatch) -> Path:
    """Put the log beside the run's other records, if the run came as far as making its folder."""
    folders = watch.run_folders()
    return log.rename(folders[-1] / LOG_NAME) if folders else log
