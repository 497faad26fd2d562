"""A run that is stopped at any moment goes on with the same command, and writes the bytes of one that was not."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from script.data import articles, pieces, prepare_corpus, staging
from script.data.encoders import TokenizerChoice
from script.data.encoding import Recipe, encode_all
from script.data.progress import ProgressLine, duration

LINES = "".join(json.dumps({"text": f"document {number} " * (1 + number % 7)}) + "\n" for number in range(60))


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Sixty documents in many pieces; every piece is journalled."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 256)
    monkeypatch.setattr(staging, "COMMIT_SECONDS", 0.0)
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    return path


@pytest.fixture
def run(source, tmp_path):
    """`run(name, *options)` -> exit code of preparing the source as tmp_path/name."""

    def prepare(name, *options):
        words = (source, "--tokenizer", "bytes", "--output", tmp_path / name, "--workers", 1, *options)
        return prepare_corpus.main([str(word) for word in words])

    return prepare


def files(directory, name):
    return [(directory / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def stop_after(monkeypatch, pieces_done, error=KeyboardInterrupt):
    """Let `append` fail in the middle of the piece after `pieces_done`."""
    append, counted = staging.Staging.append, []

    def fail(self, documents, file, cursor):
        counted.append(cursor)
        if len(counted) > pieces_done:
            self._files[staging.TOKENS].write(b"half of it")
            raise error
        append(self, documents, file, cursor)

    monkeypatch.setattr(staging.Staging, "append", fail)
    return lambda: monkeypatch.setattr(staging.Staging, "append", append)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (OSError("disk full"), 1)])
@pytest.mark.parametrize("pieces_done", [0, 3, 9])
def test_going_on(run, tmp_path, monkeypatch, capsys, pieces_done, error, code):
    assert run("whole", "--save-text", tmp_path / "whole.jsonl") == 0
    mend = stop_after(monkeypatch, pieces_done, error)
    assert run("x", "--save-text", tmp_path / "x.jsonl") == code
    assert not list(tmp_path.glob("x.*"))
    mend()
    capsys.readouterr()
    assert run("x", "--save-text", tmp_path / "x.jsonl") == 0
    assert ("going on after" in capsys.readouterr().err) is (pieces_done > 0)
    assert files(tmp_path, "x") == files(tmp_path, "whole")
    assert (tmp_path / "x.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_going_on_after_a_read_that_failed(run, tmp_path, monkeypatch, capsys):
    """A disk, or a network file system, that fails for a moment costs no work; content that is wrong leaves nothing."""
    assert run("whole") == 0
    read = articles.read_pieces

    def fail(path, start):
        for number, piece in enumerate(read(path, start)):
            if number == 5:
                raise OSError(errno.EIO, "Input/output error")
            yield piece

    monkeypatch.setattr(articles, "read_pieces", fail)
    assert run("x") == 1
    said = capsys.readouterr().err
    assert "the same command goes on from there" in said
    assert f"Input/output error: '{tmp_path / 'a.jsonl'}'" in said
    monkeypatch.setattr(articles, "read_pieces", read)
    assert run("x") == 0
    assert "going on after" in capsys.readouterr().err
    assert files(tmp_path, "x") == files(tmp_path, "whole")


@pytest.mark.parametrize("change", ["input", "option", "journal", "tokens"])
def test_what_has_changed_starts_anew(run, source, tmp_path, monkeypatch, capsys, change):
    stop_after(monkeypatch, 5)()
    mend = stop_after(monkeypatch, 5)
    run("x")
    mend()
    options = ["--no-append-eod"] if change == "option" else []
    if change == "input":
        source.write_text(LINES.replace("document 59", "document 60"))
    if change == "journal":
        (tmp_path / ".x.partial" / "journal.json").write_text("{}")
    if change == "tokens":
        os.truncate(tmp_path / ".x.partial" / "tokens.bin", 3)
    capsys.readouterr()
    assert run("x", *options) == 0
    said = capsys.readouterr().err
    assert "is of other inputs or options: starting anew" in said
    assert "going on" not in said
    assert run("whole", *options) == 0
    assert files(tmp_path, "x") == files(tmp_path, "whole")


def test_stopped_between_putting_the_files_in_their_places(run, tmp_path, monkeypatch):
    assert run("whole") == 0
    replace = Path.replace

    def stop(self, target):
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stop)
    assert run("x") == 130
    assert (tmp_path / "x.bin").exists()
    monkeypatch.setattr(Path, "replace", replace)
    assert run("x") == 0  # not "is there already": it is this command's own
    assert files(tmp_path, "x") == files(tmp_path, "whole")
    assert not (tmp_path / ".x.partial").exists()
    with pytest.raises(SystemExit):
        run("x")


def test_a_limit_holds_over_a_stop(run, tmp_path, monkeypatch):
    mend = stop_after(monkeypatch, 4)
    run("x", "--limit", 33)
    mend()
    assert run("x", "--limit", 33) == 0
    assert run("whole", "--limit", 33) == 0
    assert files(tmp_path, "x") == files(tmp_path, "whole")


def test_two_programs_do_not_write_the_same_corpus(run, tmp_path, capsys):
    with staging.staging(tmp_path / "x", None, "another"):
        assert run("x") == 1
    assert "another program is writing" in capsys.readouterr().err


KILLED = """
import sys, time
from script.data import pieces, prepare_corpus, staging
pieces.PIECE_BYTES, staging.COMMIT_SECONDS = 256, 0.0
append = staging.Staging.append
def slowly(self, *arguments):
    append(self, *arguments)
    time.sleep(0.1)
staging.Staging.append = slowly
sys.exit(prepare_corpus.main(sys.argv[1:]))
"""


def test_killed_with_its_workers_alive(run, source, tmp_path):
    """SIGKILL in the middle, two workers: what is there is gone on with by one worker, and no worker stays behind."""
    words = (source, "--tokenizer", "bytes", "--output", tmp_path / "x", "--workers", 2)
    command = [sys.executable, "-c", KILLED, *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    journal = tmp_path / ".x.partial" / "journal.json"
    deadline = time.monotonic() + 60
    while not (journal.exists() and json.loads(journal.read_text())["documents"] >= 8):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=30)  # its standard error ends when the last of its workers does
    assert 8 <= json.loads(journal.read_text())["documents"] < 60
    assert run("x") == 0
    assert run("whole") == 0
    assert files(tmp_path, "x") == files(tmp_path, "whole")


def test_a_killed_worker_is_one_line(source):
    import multiprocessing

    recipe = Recipe(tokenizer=TokenizerChoice(name="bytes"))
    results = encode_all(pieces.read_pieces(source), recipe, 2)
    next(results)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="a worker process was killed; the same command goes on"):
        list(results)


class TestProgress:
    def test_line(self):
        line = ProgressLine(1000, (200, 10, 100)).line(400, 30, 500, seconds=2.0)
        assert line == "40 %  30 documents  500 tokens  10 documents/s  0.00 MB/s  6 s left"

    def test_nothing_read_yet(self):
        assert "left" not in ProgressLine(1000).line(0, 0, 0, seconds=0.0)

    @pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (90, "2 min"), (7200, "2 h")])
    def test_duration(self, seconds, text):
        assert duration(seconds) == text

    def test_a_file_is_not_flooded(self):
        stream = io.StringIO()
        progress = ProgressLine(10, stream=stream)
        for _ in range(100):
            progress.show(1, 1, 1)
        progress.end()
        assert stream.getvalue() == ""
