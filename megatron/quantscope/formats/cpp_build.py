"""The C++ kernels, compiled on the machine that runs them, once, and loaded.

A compiler on the spot makes better code than a wheel could (`-march=native`), and there is no binary to trust. The
library is kept in the cache under a name made of everything it depends on: the sources, the compiler, its flags, and
what the processor can do. So a change of any of them builds a new one beside the old, and a home directory shared by
different machines is no trouble.

The ranks of a run start together. They wait for each other on a lock of the cache's directory, which the system takes
from a process that dies; the first builds, the others find the library. It gets its name when it is complete, so even
without a lock (some network file systems have none) nobody loads half a file.

A machine without a compiler goes on with the torch backend, after one warning.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

from megatron.quantscope.cache import cache_dir

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
MAIN = "kernels.cc"
COMPILERS = ("g++", "clang++", "c++")
ARCHITECTURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"native": ("-march=native",), "avx2": ("-mavx2",), "portable": ()}
)
"""What to compile for. The default is all that the processor has; the others are there to be tested."""
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fwrapv", "-ffp-contract=off", "-Wno-psabi")
_THREADS = "-fopenmp"
_BUILD_TIMEOUT_S = 300
_UNFINISHED = ".tmp"
_KEY_LENGTH = 20  # characters of a SHA-256


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which."""


@cache
def library(architecture: str = "native") -> ctypes.CDLL | None:
    """The kernels for an architecture, built if need be; None, after one warning, where that can not be done."""
    try:
        return _loaded(architecture)
    except (BuildError, OSError) as error:
        logger.warning("no C++ kernels, formats run on the slower torch backend: %s", error)
        return None


def _loaded(architecture: str) -> ctypes.CDLL:
    """The library, built anew if the file there is is none.

    Raises:
        BuildError: There is no compiler, or it failed.
        OSError: No directory can be written, or what was built can not be loaded.
    """
    path = _built(architecture)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("%s is damaged and built again: %s", path, error)
        path.unlink(missing_ok=True)  # several ranks may find it
        return ctypes.CDLL(str(_built(architecture)))


def _built(architecture: str) -> Path:
    """The library's file.

    Raises:
        BuildError: There is no compiler, or it failed.
        OSError: No directory can be written.
    """
    command = [*_compiler(), *_FLAGS, *ARCHITECTURES[architecture]]
    name = f"{architecture}-{_key(command)}.so"
    target = _cache_directory() / name
    if target.exists():
        return target
    directory = _writable_directory()
    target = directory / name
    if not target.exists():
        with _locked(directory):
            if not target.exists():
                _remove_unfinished(directory)
                _build(command, target)
    return target


def _compiler() -> list[str]:
    """$CXX, which may have arguments, or the first of the usual names.

    Raises:
        BuildError: There is none.
    """
    wanted = os.environ.get("CXX")
    try:
        candidates = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"CXX={wanted!r} can not be read: {error}") from error
    for words in candidates:
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    raise BuildError(f"no C++ compiler found: looked for {wanted or ', '.join(COMPILERS)}; set CXX")


def _key(command: list[str]) -> str:
    """A digest of all that the library depends on."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    compiler = command[: command.index(_FLAGS[0])]
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(b"\0".join([*(word.encode() for word in command), version, _processor().encode()]))
    return digest.hexdigest()[:_KEY_LENGTH]


def _processor() -> str:
    """What the processor can do, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    telling = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join([platform.machine(), *sorted(telling)])


def _cache_directory() -> Path:
    return cache_dir() / "kernels"


def _writable_directory() -> Path:
    """The cache's folder for kernels, or a private temporary one where the cache is read-only."""
    directory = _cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except OSError as error:
        logger.debug("the cache %s can not be written: %s", directory, error)
    return _temporary_directory()


@cache
def _temporary_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="quantscope-kernels-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, where the file system has locks."""
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("%s has no locks: %s", directory, error)
        yield


def _reason(messages: str) -> str:
    """The first line that names an error, else the first."""
    lines = messages.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[0])


def _remove_unfinished(directory: Path) -> None:
    """Remove what killed builds have left behind; the lock is held, and without locks age tells."""
    for file in directory.glob(f"*{_UNFINISHED}"):
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > _BUILD_TIMEOUT_S:
                file.unlink()


def _build(command: list[str], target: Path) -> None:
    """Compile, with threads if the compiler has them, and move the result to its name.

    Raises:
        BuildError: The compiler failed; nothing is left behind.
    """
    logger.info("compiling the C++ kernels into %s", target)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.stem}-", suffix=_UNFINISHED)
    os.close(handle)
    unfinished = Path(name)
    try:
        for threads in ((_THREADS,), ()):
            arguments = [*command, *threads, str(SOURCES / MAIN), "-o", str(unfinished)]
            try:
                done = subprocess.run(arguments, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{command[0]} took more than {_BUILD_TIMEOUT_S} s") from error
            if done.returncode == 0:
                with unfinished.open("rb") as file:
                    os.fsync(file.fileno())  # the name must not outlive the content in a power failure
                unfinished.replace(target)
                return
        raise BuildError(f"{command[0]} failed with exit code {done.returncode}: {_reason(done.stderr)}")
    finally:
        unfinished.unlink(missing_ok=True)
