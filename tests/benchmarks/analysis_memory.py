"""The memory of a command and all its processes, and how long it took."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

INTERVAL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Largest sums over the processes of a command, in bytes.

    Attributes:
        proportional: Of PSS: pages that several processes map count once altogether.
        resident: Of RSS: such pages count in each.
        largest: RSS of the largest process.
        seconds: How long the command took.
        output: What it said.
    """

    proportional: int
    resident: int
    largest: int
    seconds: float
    output: str


def run_watched(command: Sequence[str]) -> Peak:
    """Run a command and look at its processes until it ends.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        seen = [(0, 0, 0)]
        while running.poll() is None:
            seen.append(_memory_of(running.pid))
            time.sleep(INTERVAL_SECONDS)
        output = running.stdout.read() if running.stdout else ""
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    proportional, resident, largest = (max(column) for column in zip(*seen, strict=True))
    seconds = time.perf_counter() - start
    return Peak(proportional=proportional, resident=resident, largest=largest, seconds=seconds, output=output)


def _memory_of(pid: int) -> tuple[int, int, int]:
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0, 0
    found = []
    for process in processes:
        try:
            found.append(process.memory_full_info())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    resident = [info.rss for info in found]
    return sum(info.pss for info in found), sum(resident), max(resident, default=0)
