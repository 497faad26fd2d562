"""What the formats cost beside a plain copy: `python -m tests.benchmarks.formats`.

Each round runs everything once, `y.copy_(x)` among it, and a row's ratio is the median over the rounds of its time by
that of the copy of the same round, so a busy machine slows both. Times are CPU time of one thread. Rows are of bf16
but where they say float32, and these are compared with a copy of float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

COPY, COPY_FLOAT32 = "y.copy_(x)", "y.copy_(x), float32"
UNSCALED_GOAL, BLOCK_GOAL, STATISTICS_GOAL, ERRORS_GOAL, AVX2_GOAL = 1.2, 1.6, 1.2, 2.5, 2.2
AVX512_BYTES, AVX2_BYTES = 64, 32
NS = 1e9


@dataclass(frozen=True)
class Row:
    """Something to time.

    Attributes:
        name: What it is.
        run: Does it once.
        goal: At most so many times the copy; None: just to compare with.
        copy: The row of the copy that it is compared with.
    """

    name: str
    run: Callable[[], object]
    goal: float | None = None
    copy: str = COPY


def main() -> None:
    """Print the table of the CPU, and that of the GPU where there is one."""
    options = _parser().parse_args()
    import torch

    from megatron.quantscope.formats import cpp_backend, cpp_build
    from tests.benchmarks import formats_gpu

    torch.set_num_threads(1)
    library = cpp_build.library(options.architecture)
    if library is not None:
        cpp_backend.library = lambda: library
    width = 0 if library is None else library.qs_width()
    print(f"{options.side} x {options.side} bf16, one thread, {options.rounds} rounds, {_kernels(width)}")
    _print_table(_rows(options.side, width), options.rounds, options.side**2)
    if torch.cuda.is_available():
        formats_gpu.main([])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.formats", description=__doc__)
    parser.add_argument("--side", type=int, default=4096, metavar="N", help="rows and columns of the matrix")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="how often everything is run")
    parser.add_argument(
        "--architecture",
        default="native",
        choices=["native", "avx2", "portable"],
        help="what the C++ kernels are compiled for",
    )
    return parser


def _kernels(width: int) -> str:
    names = {AVX512_BYTES: "C++ AVX-512", AVX2_BYTES: "C++ AVX2", 0: "torch, no C++ compiler"}
    return names.get(width, "C++ without AVX2")


def _rows(side: int, width: int) -> list[Row]:
    import torch

    from megatron.quantscope.formats import FORMATS, fake_quantize, measure, measure_blocks, measure_format

    wide = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    x, wide_y = wide.bfloat16(), torch.empty_like(wide)
    y = torch.empty_like(x)

    def goal(of_avx512: float) -> float | None:
        return {AVX512_BYTES: of_avx512, AVX2_BYTES: max(of_avx512, AVX2_GOAL)}.get(width)

    rows = [Row(COPY, lambda: y.copy_(x)), Row("x.clone()", x.clone)]
    for name, fmt in FORMATS.items():
        wanted = {"e8m0": goal(BLOCK_GOAL), None: goal(UNSCALED_GOAL) if name == "hifp8" else None}.get(fmt.scale)
        for axis in (1, 0) if fmt.block else (1,):
            label = f"{name}, axis {axis}" if fmt.block else name
            rows.append(Row(label, lambda name=name, axis=axis: fake_quantize(x, name, axis=axis, out=y), wanted))
    rows.append(Row("hifp8, in place", lambda: fake_quantize(y, "hifp8", out=y)))
    rows.append(Row("statistics", lambda: measure(x), goal(STATISTICS_GOAL)))
    rows.append(Row("statistics, map of blocks", lambda: measure_blocks(x)))
    for name in ("mxfp8", "mxfp4", "hifp8"):
        rows.append(Row(f"statistics, errors of {name}", lambda name=name: measure_format(x, name), goal(ERRORS_GOAL)))
    rows.append(Row(COPY_FLOAT32, lambda: wide_y.copy_(wide), copy=COPY_FLOAT32))
    rows.append(Row("statistics, float32", lambda: measure(wide), goal(STATISTICS_GOAL), COPY_FLOAT32))
    rows.append(Row("statistics, map of blocks, float32", lambda: measure_blocks(wide), copy=COPY_FLOAT32))
    return [*rows, *_peers(x)]


def _peers(x: object) -> list[Row]:
    """What others take for the same, where they are installed."""
    if find_spec("torchao") is None:
        return []
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def through_mx() -> object:
        scale, data = to_mx(x, torch.float8_e4m3fn, 32)
        return to_dtype(data, scale, torch.float8_e4m3fn, 32, torch.bfloat16)

    return [Row("torchao to_mx, to_dtype e4m3", through_mx)]


def _print_table(rows: list[Row], rounds: int, elements: int) -> None:
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    for number in range(rounds + 1):
        for row in rows:
            start = time.process_time()
            row.run()
            if number:  # the first round warms up
                times[row.name].append(time.process_time() - start)
    print(f"{'':34} {'ns/element':>10} {'x copy_':>8} {'goal':>6}")
    for row in rows:
        ratio = statistics.median(own / copy for own, copy in zip(times[row.name], times[row.copy], strict=True))
        took = statistics.median(times[row.name]) / elements * NS
        goal = "" if row.goal is None else f"{row.goal:6.1f} {'met' if ratio <= row.goal else 'missed'}"
        print(f"{row.name:34} {took:10.3f} {ratio:8.2f} {goal}".rstrip())


if __name__ == "__main__":
    main()
