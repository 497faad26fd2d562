"""What --overwrite may replace: a directory that holds nothing but what the program itself writes there.

Replacing a directory removes all that is in it. So one foreign file (notes, other weights, a training's checkpoint)
is enough to leave it alone, and it is named; and what is read is never inside what is replaced, nor around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath


@dataclass(frozen=True, kw_only=True)
class Product:
    """What a program writes into a directory.

    Attributes:
        kind: what it is called.
        marker: the file without which it is none.
        contents: patterns of all that belongs to it, relative to the directory; one that stands for a directory does
            not stand for what is in that.
    """

    kind: str
    marker: str
    contents: Sequence[str]

    def overlap(self, source: Path, output: Path) -> str | None:
        """Say that one of the two is the other, or is inside it; None: they lie apart."""
        read, written = source.resolve(), output.resolve()
        if read == written:
            return f"{output} is what is read; choose another directory"
        if read in written.parents:
            return f"{output} is inside {source}, which is read; choose another directory"
        if written in read.parents:
            return f"{output} holds {source}, which is read; choose another directory"
        return None

    def occupied(self, output: Path, *, overwrite: bool) -> str | None:
        """Say why `output` can not be written to; None: it is not there, empty, or may be replaced."""
        if not output.exists():
            return None
        if not output.is_dir():
            return f"{output} is no directory"
        if not any(output.iterdir()):
            return None
        missing = None if (output / self.marker).is_file() else f"{self.marker} is missing"
        if reason := self._foreign(output) or missing:
            return f"{output} holds something that is no {self.kind}: {reason}; choose another directory"
        return None if overwrite else f"{output} holds a {self.kind} already; --overwrite replaces it"

    def _foreign(self, directory: Path, above: tuple[str, ...] = ()) -> str | None:
        """The first thing in a directory that does not belong there."""
        for path in sorted(directory.iterdir()):
            parts = (*above, path.name)
            if not any(_matches(parts, PurePath(pattern).parts) for pattern in self.contents):
                return "/".join(parts)
            if path.is_dir() and not path.is_symlink() and (inner := self._foreign(path, parts)):
                return inner
        return None


def _matches(parts: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
