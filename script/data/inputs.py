"""The files that a command line names: files, directories of them, and patterns."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from script.data.command_line import InputError

DATA_NAMES = ("*.xml", "*.jsonl", "*.json", "*.txt", "*.md", "*.text")
PACKINGS = ("", ".bz2", ".gz")


def input_files(names: Sequence[str]) -> list[Path]:
    """The files that are named, in that order; those of a directory or pattern in the order of their names.

    Args:
        names: a file; a directory, of which every file with one of the known endings is taken, at any depth; or a
            pattern with *, ?, [..] and ** (any depth).

    Raises:
        InputError: there is nothing by a name.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_file():
            found: Iterable[Path] = [path]
        elif path.is_dir():
            found = {file for packing in PACKINGS for known in DATA_NAMES for file in path.rglob(known + packing)}
        else:
            found = map(Path, glob.glob(str(path), recursive=True))
        chosen = sorted(file for file in found if file.is_file())
        if not chosen:
            kinds = f"{', '.join(DATA_NAMES)} in it, packed or not" if path.is_dir() else "such file"
            raise InputError(f"{name}: no {kinds}")
        files += chosen
    return files
