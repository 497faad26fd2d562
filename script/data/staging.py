"""Where a corpus lies until it is complete, so that a run that was killed goes on where it was.

    .PREFIX.partial/tokens.bin     what will be PREFIX.bin, growing document by document
    .PREFIX.partial/lengths.i32    tokens of each document
    .PREFIX.partial/journal.json   how far both are sound, where reading goes on, and what they are made of
    .TEXT.partial                  the same of --save-text, beside its place

The journal is replaced after what it speaks of is on the disk; what lies behind its figures is cut off at the next
start. Its identity is a digest of inputs, tokenizer and options: with another one the corpus starts anew.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from script.data.command_line import InputError
from script.data.pieces import Cursor

if TYPE_CHECKING:
    import numpy as np

    from script.data.encoding import Documents

logger = logging.getLogger(__name__)

COMMIT_SECONDS = 2.0  # between two journals: this much work is done again at most
JOURNAL = "journal.json"
TOKENS, LENGTHS, TEXT = "tokens", "lengths", "text"


@dataclass(frozen=True, kw_only=True)
class Journal:
    """How far a corpus has come.

    Attributes:
        identity: digest of what it is made of.
        file: number of the input that is being read.
        cursor: the place in it where reading goes on.
        documents, tokens, characters: written so far.
        sizes: bytes of each file that are sound.
        finished: everything is written; what remains is to put the files in their places.
    """

    identity: str
    file: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    documents: int = 0
    tokens: int = 0
    characters: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    finished: bool = False


class Staging:
    """The files of a corpus that is being written; made by `staging`.

    Attributes:
        journal: how far it has come, this moment; what is on disk may lag behind.
    """

    def __init__(self, prefix: Path, text: Path | None, identity: str) -> None:
        self.directory = staging_directory(prefix)
        self._paths = {TOKENS: self.directory / "tokens.bin", LENGTHS: self.directory / "lengths.i32"}
        if text is not None:
            self._paths[TEXT] = text.with_name(f".{text.name}.partial")
        self._targets = {TOKENS: Path(f"{prefix}.bin"), TEXT: text, "index": Path(f"{prefix}.idx")}
        self.journal = self._resume(identity)
        self._committed = time.monotonic()
        self._files: dict[str, IO[bytes]] = {}

    def _resume(self, identity: str) -> Journal:
        """Return the journal that is there, if it is of the same corpus; else clear what is there."""
        try:
            stored = json.loads((self.directory / JOURNAL).read_text(encoding="utf-8"))
            journal = Journal(**stored | {"cursor": Cursor(**stored["cursor"])})
        except FileNotFoundError:
            journal = None
        except (ValueError, KeyError, TypeError):
            journal = Journal(identity="")  # none that this program wrote
        if journal is None or journal.identity != identity or not self._is_sound(journal):
            if journal is not None:
                logger.warning("%s is of other inputs or options: starting anew", self.directory)
            for path in self._paths.values():
                path.unlink(missing_ok=True)
            return Journal(identity=identity)
        if journal.documents:
            logger.info("going on after %d documents, %d tokens", journal.documents, journal.tokens)
        return journal

    def _is_sound(self, journal: Journal) -> bool:
        present = {name: path.stat().st_size if path.exists() else -1 for name, path in self._paths.items()}
        return journal.finished or all(size <= present.get(name, -1) for name, size in journal.sizes.items())

    def open(self) -> None:
        """Open the files for writing behind what is sound."""
        for name, path in self._paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
            self._files[name] = file
            file.truncate(self.journal.sizes.get(name, 0))

    def close(self) -> None:
        """Close the files; the journal on disk is then what holds."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def append(self, documents: Documents, file: int, cursor: Cursor) -> None:
        """Write documents; `file` and `cursor` say where reading goes on after them."""
        contents: dict[str, Any] = {TOKENS: documents.tokens.data, LENGTHS: documents.lengths.data}
        if TEXT in self._files:
            contents[TEXT] = memoryview("".join(documents.text).encode("utf-8"))
        for name, content in contents.items():
            self._files[name].write(content)
        # Only now does it count: an interrupt while writing leaves bytes that the next start cuts off.
        self.journal = replace(
            self.journal,
            sizes={name: self.journal.sizes.get(name, 0) + content.nbytes for name, content in contents.items()},
            file=file,
            cursor=cursor,
            documents=self.journal.documents + len(documents.lengths),
            tokens=self.journal.tokens + int(documents.lengths.sum()),
            characters=self.journal.characters + int(documents.characters.sum()),
        )
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Make what has been written the sound part."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._write_journal(self.journal)
        self._committed = time.monotonic()

    def finish(self, dtype: np.dtype) -> None:
        """Write the index and put every file in its place, the index last."""
        import numpy as np

        from megatron.training.data.data_files import write_index

        if not self.journal.finished:
            self.commit()
            self.close()
            write_index(self.directory / "index", np.fromfile(self._paths[LENGTHS], np.int32), dtype)
            self._write_journal(replace(self.journal, finished=True))
        for name, target in self._targets.items():
            staged = self._paths.get(name, self.directory / name)
            if target is not None and staged.exists():
                staged.replace(target)
        self.discard()

    def discard(self) -> None:
        """Remove everything but what has been put in its place."""
        self.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write_journal(self, journal: Journal) -> None:
        temporary = self.directory / f"{JOURNAL}.new"
        temporary.write_text(json.dumps(asdict(journal)), encoding="utf-8")
        temporary.replace(self.directory / JOURNAL)
        self.journal = journal


def staging_directory(prefix: Path) -> Path:
    """Where the corpus of a prefix lies until it is complete."""
    return prefix.parent / f".{prefix.name}.partial"


def is_being_put_in_place(prefix: Path) -> bool:
    """Whether a run was killed while it put complete files in their places: what is there then is its own."""
    try:
        journal = json.loads((staging_directory(prefix) / JOURNAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(journal, dict) and journal.get("finished") is True


@contextmanager
def staging(prefix: Path, text: Path | None, identity: str) -> Iterator[Staging]:
    """Hold the staging of a corpus: opened, unless it is finished already; a wrong input empties it, nothing else does.

    Raises:
        InputError: another program writes the same corpus.
    """
    directory = staging_directory(prefix)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another program is writing {prefix}.bin") from error
        store = Staging(prefix, text, identity)
        try:
            if not store.journal.finished:
                store.open()
            yield store
        except InputError:
            store.discard()
            raise
        finally:
            store.close()
