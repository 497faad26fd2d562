"""The model and text that everything uses when nothing else is named: made once, then found in the cache.

SmolLM2-135M-Instruct becomes a Megatron checkpoint with its tokenizer, 106 Wikipedia articles become a token file. Each
lies in one directory, CACHE/default/NAME, with a stamp: what it was made from, by which command, and the size of every
file. A stamp that no longer fits (another source, another recipe, a file lost or cut short) has it made anew. Each is
made by its own program in a process of its own, both at the same time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from script.data import cache
from script.data.command_line import InputError
from script.data.fetch import ATTRIBUTION_FILE, LICENCE_FILE, fetch
from script.data.sources import MODEL, TEXT, Source

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
STAMP_FILE = "stamp.json"
RECIPE_VERSION = 1  # raised when the programs come to make something else out of the same sources


@dataclass(frozen=True, kw_only=True)
class DefaultAssets:
    """Where the defaults are.

    Attributes:
        checkpoint: directory to give to --load.
        tokenizer: its tokenizer.json.
        data_prefix: PREFIX of the .bin and .idx to give to --data-path.
        text: the articles as JSON lines.
    """

    checkpoint: Path
    tokenizer: Path
    data_prefix: Path
    text: Path


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one directory of the cache is made.

    Attributes:
        directory: its name.
        what: in words, for the log.
        sources: what is fetched for it; the first is what it is made of, and lends its licence and attribution.
        command: module and arguments; `{NAME}` stands for the file of the source of that name, `{output}` for the
            directory.
    """

    directory: str
    what: str
    sources: tuple[Source, ...]
    command: tuple[str, ...]

    def identity(self) -> str:
        """Digest of what decides the content."""
        parts = [RECIPE_VERSION, *self.command, *(source.file_sha256 for source in self.sources)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


CHECKPOINT = Recipe(
    directory="smollm2-135m",
    what="importing SmolLM2-135M",
    sources=(MODEL,),
    command=("script.model.import_checkpoint", "{model}", "--output", "{output}", "--dtype", "bf16"),
)
CORPUS = Recipe(
    directory="wikipedia-106",
    what="preparing 106 Wikipedia articles",
    sources=(TEXT, MODEL),
    command=(
        *("script.data.prepare_corpus", "{text}", "--tokenizer", "{model}"),
        *("--output", "{output}/wikipedia", "--save-text", "{output}/articles.jsonl"),
    ),
)


def ensure_default_assets(log: Callable[[str], None] = logger.info) -> DefaultAssets:
    """Return the defaults, fetching and making first what is not there.

    Args:
        log: told what is done, a line each; nothing is done, and nothing told, when all is there.

    Raises:
        InputError: fetching or making failed; what was there before still is.
    """
    home = cache.cache_dir() / "default"
    with cache.locked(home):
        stale = [recipe for recipe in (CHECKPOINT, CORPUS) if not is_fresh(home, recipe)]
        try:
            make(stale, home, log)
        except OSError as error:
            raise InputError(f"the cache {home} can not be filled: {error}") from error
    checkpoint, corpus = home / CHECKPOINT.directory, home / CORPUS.directory
    return DefaultAssets(
        checkpoint=checkpoint,
        tokenizer=checkpoint / "tokenizer.json",
        data_prefix=corpus / "wikipedia",
        text=corpus / "articles.jsonl",
    )


def is_fresh(home: Path, recipe: Recipe) -> bool:
    """Whether a recipe's directory is there, whole, and made by this recipe; files that were added don't matter.

    (megatron-core keeps the index of its shuffled samples beside the data.)
    """
    directory = home / recipe.directory
    try:
        stamp = json.loads((directory / STAMP_FILE).read_text(encoding="utf-8"))
        identity, files = stamp["identity"], dict(stamp["files"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or none that this program wrote
        return False
    return bool(identity == recipe.identity()) and files.items() <= _sizes(directory).items()


def _sizes(directory: Path) -> dict[str, int]:
    """{relative path: bytes} of every file but the stamp."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != STAMP_FILE)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def make(recipes: list[Recipe], home: Path, log: Callable[[str], None]) -> None:
    """Make directories at the same time, each in a process of its own; all of them are kept, or none."""
    files = {source.name: str(fetch(source, log)) for recipe in recipes for source in recipe.sources}
    with ExitStack() as stack:
        running: list[tuple[subprocess.Popen[str], Recipe, Path]] = []
        for recipe in recipes:
            log(f"{recipe.what} (once)")
            cache.discard_abandoned(home / recipe.directory)
            output = stack.enter_context(cache.staged_directory(home / recipe.directory))
            running.append((stack.enter_context(_process(recipe, files, output)), recipe, output))
        for process, recipe, output in running:
            _, complaints = process.communicate()
            if process.returncode != 0:
                last = complaints.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
                raise InputError(f"{recipe.what} failed: {last[0]}")
            _keep_attribution(Path(files[recipe.sources[0].name]).parent, output)
            stamp = {"identity": recipe.identity(), "files": _sizes(output)}
            (output / STAMP_FILE).write_text(json.dumps(stamp, indent=1), encoding="utf-8")


def _keep_attribution(source: Path, output: Path) -> None:
    """What is made of a work is passed on under that work's terms."""
    for name in (ATTRIBUTION_FILE, LICENCE_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)


@contextmanager
def _process(recipe: Recipe, files: Mapping[str, str], output: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a recipe's command; it does not outlive the block."""
    arguments = [part.format(**files, output=output) for part in recipe.command]
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
