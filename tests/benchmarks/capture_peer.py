"""What mindstudio-probe costs on the same micro-model, written in plain torch: its own bare step beside its own dump.

Installing its hooks slows even the steps that it does not watch, so its bare steps are taken by a process of their own.
Both processes are driven by `pair_peer_steps`, step by step in turns: `python -m tests.benchmarks.capture_peer TASK` is
such a process. It trains one step for every line that it reads, and answers with the seconds of CPU that it took.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.benchmarks.capture_model import LEARNING_RATE, MICRO, MLP_FACTOR, SEED, Size, batch_of

PACKAGE = "msprobe"
BARE = "bare"
TASKS = ("statistics", "tensor")
LEVEL = "L1"  # every call of a torch function, as the taps see every GEMM
ANSWER = "seconds "


def installed() -> bool:
    """Whether mindstudio-probe is there."""
    return find_spec(PACKAGE) is not None


def pair_peer_steps(task: str, size: Size, pairs: int, directory: Path) -> list[float]:
    """For each of `pairs` pairs the CPU time of a watched step by that of a bare one."""
    ratios = []
    with _process(BARE, size, directory) as bare, _process(task, size, directory) as watched:
        for number in range(pairs + 1):
            order = (bare, watched) if number % 2 else (watched, bare)
            seconds = {process: _step_of(process) for process in order}
            for dump in (directory / task).glob("*"):
                shutil.rmtree(dump)
            if number:
                ratios.append(seconds[watched] / seconds[bare])
    return ratios


@contextlib.contextmanager
def _process(task: str, size: Size, directory: Path) -> Iterator[subprocess.Popen[str]]:
    sizes = [f"{name}={value}" for name, value in asdict(size).items()]
    words = [sys.executable, "-m", __name__, task, "--directory", str(directory / task), "--size", *sizes]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        yield process


def _step_of(process: subprocess.Popen[str]) -> float:
    process.stdin.write("step\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith(ANSWER):  # the package prints, too
            return float(line.removeprefix(ANSWER))
    raise RuntimeError(f"{' '.join(process.args)} ended by itself")


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.qkv, self.proj = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
        self.fc1 = nn.Linear(size.hidden, MLP_FACTOR * size.hidden)
        self.fc2 = nn.Linear(MLP_FACTOR * size.hidden, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] -> the same."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        context = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class PlainModel(nn.Module):
    """The micro-model in plain torch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, sequence] -> logits [batch, sequence, words]."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Train one step for each line of standard input."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("task", choices=[BARE, *TASKS])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--size", nargs="*", default=[f"{name}={value}" for name, value in asdict(MICRO).items()])
    options = parser.parse_args()
    size = Size(**{name: int(value) for name, value in (each.split("=") for each in options.size)})
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = PlainModel(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    debugger = None if options.task == BARE else _debugger(options.task, options.directory)
    for step, _ in enumerate(sys.stdin):
        seconds = _timed_step(model, optimizer, batch_of(size, step), debugger)
        print(f"\n{ANSWER}{seconds}", flush=True)


def _debugger(task: str, directory: Path) -> Any:
    from msprobe.pytorch import PrecisionDebugger

    return PrecisionDebugger(task=task, level=LEVEL, dump_path=str(directory))


def _timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, debugger: Any) -> float:
    start = time.process_time()
    if debugger is not None:
        debugger.start(model=model)
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    if debugger is not None:
        debugger.stop()
        debugger.step()
    optimizer.step()
    loss.item()
    return time.process_time() - start


if __name__ == "__main__":
    main()
