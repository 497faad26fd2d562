"""What an analysis costs: `python -m tests.benchmarks.analysis`.

    rate      GB/s of everything (tables, details, comparison, findings, texts, figures, page) and of the analysis
              alone, beside a plain read of the same bytes by as many processes. Each round runs all of them, one after
              the other, and a ratio is taken within a round, so a busy machine slows both; the first round warms up
    memory    of all processes together while a capture of `--gb N` is analysed and drawn
    page      size of report.html for 48 layers x 4 modules x 3 tensors in five types

Without `--capture` a small one with the shapes of SmolLM2-135M is written and repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks.analysis_capture import repeated_capture, small_capture
from tests.benchmarks.analysis_memory import run_watched
from tests.benchmarks.analysis_page import write_page

GB, MB = 10**9, 10**6
RATE_GOAL, MEMORY_GOAL, PAGE_GOAL = 0.3, GB, 10 * MB
_FORMAT = "mxfp8"
_PIECE = 4 << 20
_RATE_GB = 1.0  # of the capture that is repeated for the rates, where none is given


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    options = _parser().parse_args(arguments)
    if options.draw:
        _draw(*options.draw, workers=options.workers, formats=options.formats)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        small = options.capture or small_capture(folder / "small")
        if "rate" in options.parts:
            large = options.capture or repeated_capture(small, folder / "large", int(_RATE_GB * GB))
            _print_rates(large, folder, options.workers, options.rounds)
        if "memory" in options.parts:
            _print_memory(repeated_capture(small, folder / "huge", int(options.gb * GB)), folder, options.workers)
        if "page" in options.parts:
            page = write_page(folder / "page")
            print(
                f"page       {page.cells} tensors, written in {page.seconds:.1f} s: {_goal(page.bytes, PAGE_GOAL, MB)}"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.analysis", description=__doc__)
    parser.add_argument("--capture", type=Path, metavar="DIR", help="a capture of one type in pt files")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where temporary files go; links need DIR's disk")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--gb", type=float, default=1.0, metavar="N", help="size of the capture for `memory`")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="what to measure")
    parser.add_argument("--formats", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--draw", nargs=2, type=Path, help=argparse.SUPPRESS)  # what is watched in `memory`
    return parser


_PARTS = ("rate", "memory", "page")


def _print_rates(source: Path, folder: Path, workers: int, rounds: int) -> None:
    from megatron.quantscope.capture import open_capture

    size = sum(record.bytes for record in open_capture(source).records if not record.reference)
    outputs = iter(range(10**6))

    def analysis(formats: Sequence[str] | None) -> None:
        _analyse(source, folder / f"out{next(outputs)}", workers, formats)

    def everything(formats: Sequence[str] | None) -> None:
        _draw(source, folder / f"out{next(outputs)}", workers=workers, formats=formats)

    runs: dict[str, Callable[[], None]] = {
        "plain read": lambda: _read(source, workers),
        f"analysis, {_FORMAT}": lambda: analysis([_FORMAT]),
        "analysis, all formats": lambda: analysis(None),
        f"everything, {_FORMAT}": lambda: everything([_FORMAT]),
        "everything, all formats": lambda: everything(None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - start)
    print(f"rate       {size / GB:.2f} GB, {workers} workers, median of {rounds}")
    print(f"           {'':26} {'GB/s':>6}  {'x a plain read':>14}")
    for name, took in seconds.items():
        rate = size / GB / statistics.median(took)
        ratio = statistics.median(own / read for own, read in zip(took, seconds["plain read"], strict=True))
        verdict = "" if _FORMAT not in name else f"  >= {RATE_GOAL}  {'met' if rate >= RATE_GOAL else 'missed'}"
        print(f"           {name:26} {rate:6.3f}  {ratio:14.1f}{verdict}")


def _print_memory(source: Path, folder: Path, workers: int) -> None:
    from megatron.quantscope.capture import open_capture

    size = sum(record.bytes for record in open_capture(source).records if not record.reference)
    command = [sys.executable, "-m", "tests.benchmarks.analysis", "--workers", str(workers)]
    for name, formats in ((_FORMAT, ["--formats", _FORMAT]), ("all formats", [])):
        peak = run_watched([*command, *formats, "--draw", str(source), str(folder / f"drawn-{name}")])
        print(f"memory     {size / GB:.1f} GB, {name}, {workers} workers, {peak.seconds:.0f} s: {peak.output.strip()}")
        print(f"           PSS of all processes {_goal(peak.proportional, MEMORY_GOAL, MB)}")
        print(f"           RSS of all processes {peak.resident / MB:.0f} MB, of the largest {peak.largest / MB:.0f} MB")


def _goal(value: float, goal: float, unit: float) -> str:
    return f"{value / unit:.1f} MB  <= {goal / unit:.0f} MB  {'met' if value <= goal else 'missed'}"


def _read(source: Path, workers: int) -> None:
    """Read every file from begin to end, in as many processes."""
    from megatron.quantscope.analysis.workers import worker_pool

    with worker_pool(workers) as pool:
        for _ in pool.map(_read_file, sorted(source.rglob("*.pt"))):
            pass


def _read_file(path: Path) -> int:
    buffer, size = bytearray(_PIECE), 0
    with open(path, "rb", buffering=0) as file:
        while read := file.readinto(buffer):
            size += read
    return size


def _analyse(source: Path, target: Path, workers: int, formats: Sequence[str] | None) -> None:
    from megatron.quantscope.analysis.analyse import analyse
    from megatron.quantscope.capture import open_capture
    from megatron.quantscope.report.progress import Progress

    analyse(open_capture(source), target, workers, Progress(shown=False), formats)


def _draw(source: Path, target: Path, *, workers: int, formats: Sequence[str] | None) -> None:
    import logging

    from megatron.quantscope.capture import open_capture
    from megatron.quantscope.report.draw import draw
    from megatron.quantscope.report.figures import FIGURES
    from megatron.quantscope.report.progress import Progress

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    capture = open_capture(source)
    drawn = draw(capture, target, workers=workers, figures=FIGURES, progress=Progress(shown=False), formats=formats)
    print(f"{drawn.files} tensors, {len(drawn.figures.written)} figures, {len(drawn.problems)} problems")


if __name__ == "__main__":
    main()
