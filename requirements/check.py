"""Does this Python hold what the requirement files ask for? Prints what it lacks, one requirement a line.

Run by script/setup_env.sh with the interpreter in question: `python requirements/check.py requirements/runtime.txt`.
Versions are read from the installed metadata, so nothing heavy is imported and the answer takes milliseconds. Only
the standard library is used, and only the subset of the requirement syntax that our files use: `name>=1.2,<3`, and
`; sys_platform == "linux"` behind what exists for one system only.

A version counts by its leading numbers: `2.6.0a0+git` and `2.13.0+cpu` are 2.6.0 and 2.13.0, because vendors' builds of
torch carry such tags and are as good.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)\s*(?P<clauses>[<>=!][^;]*?)?\s*(;\s*sys_platform == \"(?P<platform>\w+)\")?$"
)
CLAUSE = re.compile(r"^(?P<operator>>=|<=|==|!=|<|>)\s*(?P<version>[0-9][0-9.]*)$")
LEADING_NUMBERS = re.compile(r"\d+(\.\d+)*")
COMPARISONS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros: `2.6.0a0` gives (2, 6)."""
    match = LEADING_NUMBERS.match(version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def satisfies(version: str, clauses: str) -> bool:
    """Whether `version` lies in a range such as `>=0.14,<0.20`.

    Raises:
        ValueError: A clause is not of the form that our requirement files use.
    """
    for clause in filter(None, (part.strip() for part in clauses.split(","))):
        match = CLAUSE.match(clause)
        if match is None:
            raise ValueError(f"cannot read the version clause {clause!r}")
        if not COMPARISONS[match["operator"]](release(version), release(match["version"])):
            return False
    return True


def read_requirements(path: Path) -> Iterator[tuple[str, str]]:
    """The (name, clauses) of every line of a requirement file that is for this system, comments left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = REQUIREMENT.match(text)
        if match is None:
            raise ValueError(f"{path}: cannot read the requirement {text!r}")
        if match["platform"] in (None, sys.platform):
            yield match["name"], match["clauses"] or ""


def lacking(path: Path) -> Iterator[str]:
    """What this Python lacks of a requirement file, as text to print."""
    for name, clauses in read_requirements(path):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield f"{name}{clauses}"
            continue
        if not satisfies(version, clauses):
            yield f"{name}{clauses} (has {version})"


def main(paths: list[str]) -> int:
    """Print what is lacking of all the files; 0 when nothing is."""
    missing = [text for path in paths for text in lacking(Path(path))]
    print("\n".join(missing), end="\n" if missing else "")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
