"""Where the checkpoints of a directory lie, as Megatron-LM lays them out.

    DIR/latest_checkpointed_iteration.txt   "100", or "release" for weights without a training state
    DIR/iter_0000100/                       one checkpoint, of megatron-core's dist_checkpointing
    DIR/release/
    DIR/model.json                          the model flags (`architecture`)

A checkpoint is written under a temporary name, renamed when it is complete, and only then named as the latest; so a run
that is killed at any moment leaves the previous checkpoint in force. One that is written again is set aside until its
successor has the name; should the run end between the two, it is found where it was set aside.

Temporary names begin with a dot and carry a tag of their writer: a process that outlives a killed run and goes on
writing does not write into its successor's checkpoint. What killed runs left is removed by the next save.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.training.failure import UsageError

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"


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
    name = _named(directory)
    if name is None:
        return None
    if name != RELEASE and not name.isdecimal():
        raise UsageError(f"{directory / LATEST} holds {name!r}; allowed are a number of iterations and {RELEASE!r}")
    checkpoint = _found(directory, name)
    if checkpoint is None:
        raise UsageError(f"{directory / LATEST} names {path_of(directory, name).name}, which is not there")
    return checkpoint


def chosen(directory: Path, iteration: int | None) -> Checkpoint | None:
    """The checkpoint of `iteration`, as --ckpt-step says; None: the latest.

    Raises:
        UsageError: when it is not there; the complaint says which are. And as `latest`.
    """
    if iteration is None:
        return latest(directory)
    checkpoint = _found(directory, str(iteration))
    if checkpoint is None:
        there = sorted(int(path.name[len("iter_") :]) for path in directory.glob("iter_[0-9]*") if path.is_dir())
        raise UsageError(
            f"--ckpt-step {iteration}: not in {directory}, which has {', '.join(map(str, there)) or 'none'}"
        )
    return checkpoint


def path_of(directory: Path, name: str) -> Path:
    """The folder of the checkpoint called `name`: a number of iterations, or "release"."""
    return directory / (RELEASE if name == RELEASE else f"iter_{int(name):07d}")


def being_written(directory: Path, name: str, writer: str) -> Path:
    """The folder in which the checkpoint called `name` lies until `writer` has completed it."""
    return directory / f".{path_of(directory, name).name}.{writer}{_INCOMPLETE}"


def prepare(directory: Path, name: str, writer: str) -> None:
    """Make an empty folder for a checkpoint that is about to be written, and remove remains (by one rank)."""
    for remains in directory.glob(f".*{_INCOMPLETE}"):
        shutil.rmtree(remains, ignore_errors=True)
    for aside in directory.glob(f".*{_REPLACED}"):
        successor = directory / aside.name[1 : -len(_REPLACED)]
        if successor.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(successor)
    being_written(directory, name, writer).mkdir(parents=True)


def discard(directory: Path, name: str, writer: str) -> None:
    """Remove what was written of a checkpoint that can not be completed (by one rank)."""
    shutil.rmtree(being_written(directory, name, writer), ignore_errors=True)


def complete(directory: Path, name: str, writer: str, *, retain: int | None = None) -> None:
    """Give the written checkpoint its name and make it the latest (by one rank, once all have written).

    Args:
        directory: Of the checkpoints.
        name: Of the checkpoint.
        writer: As given to `prepare`.
        retain: Remove the latest of an earlier iteration, unless this number divides that; None: keep it.
    """
    final, previous = path_of(directory, name), _named(directory)
    aside = _aside(directory, name)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    being_written(directory, name, writer).rename(final)
    temporary = directory / f".{LATEST}.{os.getpid()}"
    temporary.write_text(name, encoding="utf-8")
    temporary.replace(directory / LATEST)
    shutil.rmtree(aside, ignore_errors=True)
    if retain and previous and previous.isdecimal() and int(previous) < int(name) and int(previous) % retain:
        shutil.rmtree(path_of(directory, previous), ignore_errors=True)


def _named(directory: Path) -> str | None:
    """What the directory says is its latest checkpoint, whatever that is; None when it says nothing."""
    try:
        return (directory / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _found(directory: Path, name: str) -> Checkpoint | None:
    """The checkpoint called `name` under its own name, or where it was set aside; None when it is not there."""
    iteration = 0 if name == RELEASE else int(name)
    for path in (path_of(directory, name), _aside(directory, name)):
        if path.is_dir():
            return Checkpoint(path, iteration, name == RELEASE)
    return None


def _aside(directory: Path, name: str) -> Path:
    """Where the checkpoint called `name` lies while another one takes its name."""
    return directory / f".{path_of(directory, name).name}{_REPLACED}"
