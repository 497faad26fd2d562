"""How close fake quantisation comes to a plain copy on a GPU: `python -m tests.benchmarks.formats_gpu`.

Both read a tensor once and write one, so a copy is what the memory allows. Each kernel takes turns with `copy_`, timed
by CUDA events, and the share is that of the medians: a GPU's clock wanders, and both wander with it. GB/s counts the
bytes that have to move, 4 an element of bf16 (both axes at once: one read and two writes, 6). Formats that scale by the
amax of the whole tensor read it once more unless they are told the amax; they are measured with and without. Statistics
read a tensor once and write next to nothing, 2 bytes an element of bf16 and 4 of float32; they are left on the device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SIDES = (1 << 13, 1 << 14)  # of the square matrices: 64 M and 256 M elements
ROUNDS = 15
CALLS_A_ROUND = 10
BYTES = {"copy": 4, "quantise": 4, "both": 6, "read": 2, "read float32": 4}  # an element


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A kernel beside `copy_`.

    Attributes:
        kernel: Format and axis.
        elements: Of the tensor.
        rate: GB/s of the kernel.
        share: Of the rate of `copy_`.
    """

    kernel: str
    elements: int
    rate: float
    share: float


def measure(sides: tuple[int, ...] = SIDES) -> Iterator[Measurement]:
    """Every format along both axes, both axes at once, and statistics, on square matrices of these sides."""
    import torch

    for side in sides:
        x = torch.randn(side, side, device="cuda").bfloat16()
        out = torch.empty_like(x)
        for name, bytes_an_element, call in (*_kernels(x, out), *_statistics(x)):
            copy_time, time = _medians_in_turns(partial(out.copy_, x), call)
            rate = bytes_an_element * x.numel() / time
            copy_rate = BYTES["copy"] * x.numel() / copy_time
            yield Measurement(kernel=name, elements=x.numel(), rate=rate * 1e-9, share=rate / copy_rate)


def _kernels(x: Tensor, out: Tensor) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(name, bytes an element, call)."""
    from megatron.quantscope.formats import FORMATS, fake_quantize
    from megatron.quantscope.formats.dispatch import fake_quantize_both

    amax = x.abs().amax().float()
    for name, fmt in FORMATS.items():
        for given in (None, amax) if fmt.has_tensor_scale else (None,):
            suffix = "" if given is None else ", amax given"
            on_triton = {"amax": given, "backend": "triton"}
            for axis in (1, 0) if fmt.block else (1,):
                call = partial(fake_quantize, x, name, axis=axis, out=out, **on_triton)
                yield f"{name} axis {axis}{suffix}" if fmt.block else name + suffix, BYTES["quantise"], call
            if fmt.block:
                yield f"{name} both{suffix}", BYTES["both"], partial(fake_quantize_both, x, name, **on_triton)


def _statistics(x: Tensor) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """The same of the statistics, with and without the map of blocks."""
    from megatron.quantscope.formats.triton_statistics import DeviceStatistics

    room = (CALLS_A_ROUND + 1) * (x.numel() // 32 + (1 << 12))
    held = [DeviceStatistics(x.device, room)]

    def add(tensor: Tensor, blocks: bool) -> None:
        if held[0].add(tensor, blocks) is None:
            held[0] = DeviceStatistics(x.device, room)  # what it costs to bring the figures to the host is not measured
            held[0].add(tensor, blocks)

    wide = x.float()
    for blocks in (False, True):
        suffix = ", map of blocks" if blocks else ""
        yield f"statistics{suffix}", BYTES["read"], partial(add, x, blocks)
        yield f"statistics, float32{suffix}", BYTES["read float32"], partial(add, wide, blocks)


def _medians_in_turns(*calls: Callable[[], object]) -> list[float]:
    """Seconds a call of each, the median of rounds in which they take turns."""
    import torch

    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for times, call in zip(seconds, calls, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS_A_ROUND):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / CALLS_A_ROUND)
    return [statistics.median(times) for times in seconds]


def print_table(measurements: Iterator[Measurement]) -> None:
    """A line each, as they come."""
    print(f"{'kernel':<34} {'elements':>9} {'GB/s':>7} {'share of copy_':>15}")
    for m in measurements:
        print(f"{m.kernel:<34} {m.elements >> 20:>7} M {m.rate:>7.0f} {m.share:>15.1%}", flush=True)


def main() -> None:
    """Measure and print, or say that there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tile", type=int, help="elements a program takes, in place of the backend's own choice")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    if arguments.tile is not None:
        from megatron.quantscope.formats import triton_backend

        triton_backend.TILE = arguments.tile
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print_table(measure())


if __name__ == "__main__":
    main()
