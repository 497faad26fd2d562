"""Warm memory for what a step writes: a process that holds some, and lets go of it while the step runs.

A file's bytes go to free memory first. On a virtual machine that hands free memory back to its host (free page
reporting), memory that has been free for a second has to be asked for again, page by page, which costs five times the
write itself: 1.0 against 0.2 ns a byte on the machine of this table. The files that a step wrote are deleted after it,
so each captured step would pay that, and the bare step beside it would not. A long run does not: its memory is full of
its own earlier files. So a second process takes as much memory as a step needs before the step, and gives it back
piece by piece while the step runs. On other machines this changes nothing.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from typing import Any

PIECE = 8 << 20  # bytes that are let go together
AHEAD = 8  # pieces that are let go at once, so that the step does not run dry
SPARE = 1.2  # times the bytes that a step shows
FILL, RELEASE, DONE = "fill", "release", "done"


class Ballast:
    """The other process, as a context. Its memory is counted in pieces.

    Args:
        size: Bytes that a step may write.
    """

    def __init__(self, size: int) -> None:
        self._size = int(SPARE * size)

    def __enter__(self) -> Ballast:
        words = [sys.executable, "-m", __name__, str(self._size)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends with its input

    def fill(self) -> None:
        """Take the memory; returns when all of it is warm."""
        self._say(FILL)
        if self._process.stdout.readline().strip() != DONE:
            raise RuntimeError(f"the process that holds {self._size} bytes of memory has ended")

    def release(self, seconds: float) -> None:
        """Let go of it in the course of so many seconds; returns at once."""
        self._say(f"{RELEASE} {seconds}")

    def _say(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


def main() -> None:
    """Do what the lines of standard input say."""
    pieces = -(-int(sys.argv[1]) // PIECE)
    held: list[Any] = []
    for line in sys.stdin:
        order, *seconds = line.split()
        if order == FILL:
            held += [_warm_piece() for _ in range(pieces - len(held))]
            print(DONE, flush=True)
        else:
            _let_go(held, float(seconds[0]))


def _warm_piece() -> mmap.mmap:
    piece = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    piece.madvise(mmap.MADV_HUGEPAGE)  # or it comes back in bits that a file system does not like
    for page in range(0, PIECE, mmap.PAGESIZE):
        piece[page] = 1
    return piece


def _let_go(held: list[Any], seconds: float) -> None:
    pause = seconds / len(held)
    for number in range(len(held)):
        held.pop().close()
        if number >= AHEAD:
            time.sleep(pause)


if __name__ == "__main__":
    main()
