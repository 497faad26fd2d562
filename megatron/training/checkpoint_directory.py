"""Where the checkpoints of a directory lie, as Megatron-LM lays them out.

    DIR/latest_checkpointed_iteration.txt   "100", or "release" for weights without a training state
    DIR/iter_0000100/                       one checkpoint, of megatron-core's dist_checkpointing
    DIR/release/
    DIR/model.json                          the model flags (`architecture`)

A checkpoint is written under a temporary name, renamed when it is complete, and only then named as the latest; so a run
that is killed at any moment leaves the previous checkpoint in force.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.training.failure import UsageError

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint.

    Attributes:
        path: Its folder.
        iteration: Iterations completed when it was written; 0 for a release.
        release: True when it holds weights only, from somewhere else.
    """

    path: Path
    iteration: int
    release: bool


def latest(directory: Path) -> Checkpoint | None:
    """The checkpoint that the directory names as its latest; None when it names none.

    Raises:
        UsageError: when the name is not one, or what it names is not there.
    """
    try:
        name = (directory / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if name != RELEASE and not name.isdecimal():
        raise UsageError(f"{directory / LATEST} holds {name!r}; allowed are a number of iterations and {RELEASE!r}")
    checkpoint = Checkpoint(path_of(directory, name), 0 if name == RELEASE else int(name), name == RELEASE)
    if not checkpoint.path.is_dir():
        raise UsageError(f"{directory / LATEST} names {checkpoint.path.name}, which is not there")
    return checkpoint


def path_of(directory: Path, name: str) -> Path:
    """The folder of the checkpoint called `name`: a number of iterations, or "release"."""
    return directory / (RELEASE if name == RELEASE else f"iter_{int(name):07d}")


def being_written(directory: Path, name: str) -> Path:
    """The folder in which the checkpoint called `name` lies until it is complete."""
    return directory / f".{path_of(directory, name).name}.incomplete"


def prepare(directory: Path, name: str) -> None:
    """Make an empty folder for a checkpoint that is about to be written (by one rank)."""
    folder = being_written(directory, name)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)


def discard(directory: Path, name: str) -> None:
    """Remove what was written of a checkpoint that can not be completed (by one rank)."""
    shutil.rmtree(being_written(directory, name), ignore_errors=True)


def complete(directory: Path, name: str) -> None:
    """Give the written checkpoint its name and make it the latest (by one rank, once all have written)."""
    final, previous = path_of(directory, name), directory / f".{path_of(directory, name).name}.replaced"
    if final.exists():
        shutil.rmtree(previous, ignore_errors=True)
        final.rename(previous)
    being_written(directory, name).rename(final)
    temporary = directory / f".{LATEST}.{os.getpid()}"
    temporary.write_text(name, encoding="utf-8")
    temporary.replace(directory / LATEST)
    shutil.rmtree(previous, ignore_errors=True)
