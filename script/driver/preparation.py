"""From what was given to what the trainer reads: defaults fetched, checkpoints imported, text turned into tokens.

Each is made once and kept in the cache, under a name that holds a digest of what it was made from (path, size and time
of every source file, and the options), so that a changed source is a new entry. An entry is there completely or not at
all, and drivers that start at once wait for the one that makes it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from script.data import cache
from script.data.command_line import InputError
from script.data.default import ensure_default_assets
from script.data.fetch import fetch
from script.data.sources import TEXT
from script.driver.environment import ROOT
from script.driver.inputs import (
    GGUF,
    MEGATRON,
    BadInput,
    Checkpoint,
    Data,
    Tokenizer,
    find_tokenizer,
    open_checkpoint,
    open_data,
    open_tokenizer,
)
from script.driver.options import Options
from script.driver.trainer import Inputs, file_inputs

MODEL_FILE = "model.json"
DIGEST_CHARACTERS = 16
Log = Callable[[str], None]


@dataclass(frozen=True)
class Given:
    """What the paths of a command line hold; None: the default."""

    checkpoint: Checkpoint | None
    tokenizer: Tokenizer | None
    data: Data | None


def open_given(options: Options) -> Given:
    """Check the paths of a command line, reading nothing.

    Raises:
        BadInput: One of them holds nothing that can be used.
    """
    checkpoint = open_checkpoint(options.checkpoint_path) if options.checkpoint_path else None
    tokenizer = open_tokenizer(options.tokenizer_path) if options.tokenizer_path else None
    if checkpoint is not None and checkpoint.kind != GGUF and tokenizer is None:
        _tokenizer_of(checkpoint.path)
    return Given(checkpoint, tokenizer, open_data(options.data_path) if options.data_path else None)


def prepare(given: Given, dtype: str, log: Log) -> Inputs:
    """Make what is not there yet, and return the trainer's flags for it.

    Args:
        given: What the command line named.
        dtype: Compute dtype, to which an imported model's weights are rounded.
        log: Told what is done, a line each; nothing when all is there.

    Raises:
        InputError: Fetching, importing or preparing failed.
        BadInput: There is no tokenizer.
    """
    if given.checkpoint is None and given.tokenizer is None and given.data is None:
        assets = ensure_default_assets(log)
        return _inputs(assets.checkpoint, Tokenizer(assets.tokenizer, "HuggingFaceTokenizer"), assets.data_prefix)
    checkpoint = _checkpoint(given.checkpoint, dtype, log)
    tokenizer = given.tokenizer or _tokenizer_of(checkpoint)
    if given.data is not None and not given.data.is_text:
        return _inputs(checkpoint, tokenizer, given.data.path)
    text = given.data.path if given.data is not None else fetch(TEXT, log)
    return _inputs(checkpoint, tokenizer, _tokens(text, tokenizer, log))


def _inputs(checkpoint: Path, tokenizer: Tokenizer, data_prefix: Path) -> Inputs:
    return file_inputs(
        checkpoint=checkpoint,
        has_architecture=(checkpoint / MODEL_FILE).is_file(),
        tokenizer=tokenizer.path,
        tokenizer_kind=tokenizer.kind,
        data_prefix=data_prefix,
        cache=cache.cache_dir() / "sample-index",
    )


def _tokenizer_of(checkpoint: Path) -> Tokenizer:
    tokenizer = find_tokenizer(checkpoint)
    if tokenizer is None:
        raise BadInput(f"{checkpoint} holds no tokenizer; give one with --tokenizer-path")
    return tokenizer


def _checkpoint(given: Checkpoint | None, dtype: str, log: Log) -> Path:
    """The Megatron checkpoint directory of what was given."""
    if given is None:
        return ensure_default_assets(log).checkpoint
    if given.kind == MEGATRON:
        return given.path
    target = _entry("imported", given.path.stem, _signature(given.path), dtype)
    with cache.locked(target.parent):
        if not target.is_dir():
            log(f"importing {given.path} (once)")
            _run("script.model.import_checkpoint", str(given.path), "--output", str(target), "--dtype", dtype)
    return target


def _tokens(text: Path, tokenizer: Tokenizer, log: Log) -> Path:
    """The prefix of the token files made from a text."""
    target = _entry("tokens", text.stem, _signature(text), _signature(tokenizer.path))
    with cache.locked(target.parent):
        if not target.is_dir():
            log(f"turning {text} into tokens (once)")
            with cache.staged_directory(target) as directory:
                output = str(directory / "text")
                _run("script.data.prepare_corpus", str(text), "--tokenizer", str(tokenizer.path), "--output", output)
    return target / "text"


def _entry(kind: str, name: str, *parts: str) -> Path:
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGEST_CHARACTERS]
    return cache.cache_dir() / kind / f"{name}-{digest}"


def _signature(path: Path) -> str:
    """What changes when a file, or a file in a directory, does."""
    return "\n".join(_signature_lines(path.resolve()))


def _signature_lines(path: Path) -> Iterator[str]:
    files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.is_file())
    for file in files:
        status = file.stat()
        yield f"{file} {status.st_size} {status.st_mtime_ns}"


def _run(module: str, *arguments: str) -> None:
    """Run one of the project's programs; its complaint becomes ours."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise InputError(_last_line(done.stderr.splitlines()) or f"{module} failed with exit code {done.returncode}")


def _last_line(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line.strip()), "")
