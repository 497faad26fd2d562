"""What a check of a capture came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DAMAGED, MISSING, FOREIGN = "damaged", "missing", "foreign"
UNFINISHED, UNCOMMITTED, BROKEN_LINE = "unfinished", "uncommitted", "broken-line"
KINDS = (DAMAGED, MISSING, FOREIGN, UNFINISHED, UNCOMMITTED, BROKEN_LINE)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: One of `KINDS`.
        file: Which file, from the directory that was checked.
        message: What is wrong with it, one line.
    """

    kind: str
    file: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found.

    Attributes:
        ok: Rows, and files that no manifest lists, that are as they were written.
        bytes: That were read and found to be right; each once.
        findings: What is wrong, folder by folder.
    """

    ok: int
    bytes: int
    findings: tuple[Finding, ...]


class Report:
    """A `Verification` in the making.

    Args:
        root: The directory that is checked.
    """

    def __init__(self, root: Path) -> None:
        self.ok = 0
        self.bytes = 0
        self._root = root
        self._findings: list[Finding] = []

    def find(self, kind: str, path: Path, message: str) -> None:
        """Something is wrong with `path`; a message that begins with the path says it once."""
        self._findings.append(
            Finding(kind=kind, file=str(path.relative_to(self._root)), message=message.removeprefix(f"{path} "))
        )

    def result(self) -> Verification:
        """What was found."""
        return Verification(ok=self.ok, bytes=self.bytes, findings=tuple(self._findings))
