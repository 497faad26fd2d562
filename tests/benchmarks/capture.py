"""What capture costs beside the bare step: `python -m tests.benchmarks.capture`.

Two equal copies of a micro-model (`capture_model`) train side by side in this process, one of them captured, and must
stay equal to the bit. Every number is a ratio of two things that ran one after the other, the median over the pairs,
with the quartiles beside it.

    CPU            CPU time of all threads, from the step's beginning until its iteration is on disk, by the bare step's
    blocked        time that the training thread spends in calls into capture, by that of a memcpy of the same tensors
    to disk        bytes a second, from the first tensor shown until all are on disk, by those of one raw sequential
                   write of as many bytes as the capture has written; nothing is fsynced, and no model runs
    raw write      the bare step's CPU time while a thread writes as many bytes as the capture, by the bare step's:
                   what the operating system alone takes for them

`--profile MODE` prints instead where the time of a mode goes (`capture_profile`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.benchmarks.capture_model import Size, Trainer
    from tests.benchmarks.capture_rounds import Mode, StepRatios
    from tests.benchmarks.capture_watch import Recorder

MB = 1e6
MILLION = 1e6
WIDTH = 46
CAPTURES = "captures"  # beside the rendezvous of the process group
BLOCKED_GOAL = 1.3
PROFILED_STEPS = 5

# name: (save mode, save format, CPU at most, bytes a second at least)
MODES: dict[str, tuple[str, str, float | None, float | None]] = {
    "statistics": ("statistics", "segment", 1.15, None),
    "segment": ("tensors", "segment", 1.3, 0.8),
    "pt": ("tensors", "pt", 1.6, 0.6),
    "both": ("both", "segment", None, None),
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the table: the ratios of all pairs, and what their median has to be."""

    what: str
    ratios: list[float]
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        """The median, the quartiles, and whether the goal is met."""
        median = statistics.median(self.ratios)
        low, high = median, median
        if len(self.ratios) > 1:
            low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return f"{self.what:{WIDTH}} {median:7.2f}   {low:6.2f} .. {high:<6.2f} {self._verdict(median)}".rstrip()

    def _verdict(self, median: float) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:<4g} {'met' if median <= self.at_most else 'missed'}"
        if self.at_least is not None:
            return f">= {self.at_least:<4g} {'met' if median >= self.at_least else 'missed'}"
        return ""


def main() -> None:
    """Print the table, or a profile."""
    options = _parser().parse_args()
    warnings.filterwarnings("ignore")  # megatron-core tells what is not installed
    from tests.benchmarks import capture_model

    size = capture_model.TINY if options.tiny else capture_model.MICRO
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        capture_model.start_process(Path(folder))
        if options.profile:
            _profile(options.profile, size, Path(folder) / CAPTURES)
        elif not _print_table(options.modes, size, options.pairs, Path(folder) / CAPTURES):
            sys.exit("capture has changed the training")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.capture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="pairs of every measurement (default 20)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="what to measure (default all)")
    parser.add_argument("--directory", metavar="DIR", help="where to write and delete (default: the temporary folder)")
    parser.add_argument("--profile", choices=MODES, help="print where the time of this mode goes")
    parser.add_argument("--tiny", action="store_true", help="a model of no use but to see that the program runs")
    return parser


def _mode(name: str) -> Mode:
    from tests.benchmarks.capture_rounds import Mode

    save_mode, save_format, cpu, disk = MODES[name]
    blocked = None if disk is None else BLOCKED_GOAL  # a goal of what copies tensors and no more
    return Mode(name=name, save_mode=save_mode, save_format=save_format, cpu=cpu, blocked=blocked, disk=disk)


def _profile(name: str, size: Size, folder: Path) -> None:
    from tests.benchmarks.capture_model import Trainer
    from tests.benchmarks.capture_profile import print_profile
    from tests.benchmarks.capture_rounds import record_step

    trainer = Trainer(size)
    shown = record_step(trainer, folder).bytes
    print_profile(_mode(name), trainer, PROFILED_STEPS, shown, folder)


def _print_table(names: list[str], size: Size, pairs: int, folder: Path) -> bool:
    """Print all lines as they are measured; returns whether capture has left the training as it was."""
    from tests.benchmarks.capture_model import Trainer
    from tests.benchmarks.capture_rounds import record_step

    bare, captured, watched = Trainer(size), Trainer(size), Trainer(size)
    recorder = record_step(watched, folder)
    print(
        f"{bare.parameters / MILLION:.1f} M parameters, fp32, one thread, {pairs} pairs; a step shows "
        f"{len(recorder.rows)} tensors, {recorder.bytes / MB:.1f} MB"
    )
    print(f"{'':{WIDTH}} {'median':>7}   {'quartiles':16} goal")
    modes = [_mode(name) for name in names]
    for line in _lines(modes, bare, captured, watched, recorder, pairs, folder):
        print(line, flush=True)
    return bare.equals(captured)


def _lines(
    modes: list[Mode], bare: Trainer, captured: Trainer, watched: Trainer, recorder: Recorder, pairs: int, folder: Path
) -> Iterator[Line | str]:
    from tests.benchmarks.capture_rounds import blocked_ratios, disk_ratios, pair_steps, raw_step_ratios

    for mode in modes:
        steps = pair_steps(mode, bare, captured, pairs, folder)
        yield Line(what=f"{mode.name}: CPU, until on disk", ratios=steps.cpu, at_most=mode.cpu)
        yield Line(what=f"{mode.name}: CPU, until the step ends", ratios=steps.cpu_at_end)
        yield Line(what=f"{mode.name}: wall time, until the step ends", ratios=steps.wall_at_end)
        blocked = blocked_ratios(mode, watched, pairs, recorder.bytes, folder)
        yield Line(what=f"{mode.name}: blocked, by a memcpy", ratios=blocked.wall, at_most=mode.blocked)
        yield Line(what=f"{mode.name}: blocked, CPU of the thread alone", ratios=blocked.cpu)
        if mode.disk is not None:
            disk = disk_ratios(mode, recorder, pairs, folder)
            yield Line(what=f"{mode.name}: written to disk, by a raw write", ratios=disk.written, at_least=mode.disk)
            yield Line(what=f"{mode.name}: shown to disk, by a raw write", ratios=disk.shown)
            raw = raw_step_ratios(watched, steps.usage.bytes, pairs, folder.with_name("raw"))
            yield Line(what=f"{mode.name}: CPU of a raw write within the step", ratios=raw)
        yield _usage(mode, steps, recorder.bytes)
    yield from _peer_lines(watched.size, pairs, folder)


def _usage(mode: Mode, steps: StepRatios, shown: int) -> str:
    written, bare = steps.usage.bytes, statistics.median(steps.bare)
    return (
        f"{mode.name}: an iteration writes {steps.usage.files} files, {written / MB:.1f} MB, and saves "
        f"{(shown - written) / MB:.1f} MB; the bare step takes {bare:.2f} s of CPU; {steps.unequal} losses differ"
    )


def _peer_lines(size: Size, pairs: int, folder: Path) -> Iterator[Line | str]:
    from tests.benchmarks import capture_peer

    if not capture_peer.installed():
        yield "mindstudio-probe is not installed"
        return
    for task in capture_peer.TASKS:
        ratios = capture_peer.pair_peer_steps(task, size, pairs, folder)
        yield Line(what=f"mindstudio-probe, {task} {capture_peer.LEVEL}: CPU", ratios=ratios)


if __name__ == "__main__":
    main()
