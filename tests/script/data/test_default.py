"""The defaults are made once, whole or not at all, and made anew when their stamp does not fit."""

from dataclasses import replace

import pytest

from script.data import default
from script.data.command_line import InputError

MODULE = """\
import pathlib, sys
source, output, text = sys.argv[1:]
(pathlib.Path(output) / "sub").mkdir()
(pathlib.Path(output) / "sub" / "made").write_text(text + pathlib.Path(source).read_text())
with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
    print(text, file=calls)
if text == "broken":
    sys.exit("first line\\nit broke")
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A directory with a program that stands for the importer, run as `python -m maker`."""
    directory = tmp_path / "repository"
    directory.mkdir()
    (directory / "maker.py").write_text(MODULE)
    monkeypatch.setattr(default, "REPOSITORY", directory)
    return directory


@pytest.fixture
def recipe(repository, published):
    source = published(b"weights")
    return default.Recipe(
        directory="made", what="making it", sources=(source,), command=("maker", "{tiny}", "{output}", "of ")
    )


@pytest.fixture
def home(cache):
    return cache / "default"


def _calls(repository):
    return (repository / "calls").read_text().splitlines()


def test_makes_what_is_not_there(recipe, home):
    lines = []
    assert not default.is_fresh(home, recipe)
    default.make([recipe], home, lines.append)
    assert default.is_fresh(home, recipe)
    assert (home / "made" / "sub" / "made").read_text() == "of weights"
    assert [line.split(" (")[0] for line in lines] == ["fetching model.gguf", "making it"]
    assert [path.name for path in home.iterdir()] == ["made"]
    assert (home / "made" / "ATTRIBUTION.txt").read_text() == "made by a test\n"
    assert (home / "made" / "LICENSE").read_text() == "licence text"


def test_a_file_that_was_added_does_not_matter(recipe, home):
    default.make([recipe], home, lambda _: None)
    (home / "made" / "cache").mkdir()
    (home / "made" / "cache" / "index.npy").write_text("x")
    assert default.is_fresh(home, recipe)


def _lose(directory):
    (directory / "sub" / "made").unlink()


def _cut(directory):
    (directory / "sub" / "made").write_text("of weight")


def _garble_stamp(directory):
    (directory / "stamp.json").write_text("{")


def _write_another_stamp(directory):
    (directory / "stamp.json").write_text("[]")


@pytest.mark.parametrize("damage", [_lose, _cut, _garble_stamp, _write_another_stamp])
def test_damage_makes_it_stale(recipe, home, damage):
    default.make([recipe], home, lambda _: None)
    damage(home / "made")
    assert not default.is_fresh(home, recipe)
    default.make([recipe], home, lambda _: None)
    assert default.is_fresh(home, recipe)
    assert (home / "made" / "sub" / "made").read_text() == "of weights"


def test_another_source_or_command_makes_it_stale(recipe, home):
    default.make([recipe], home, lambda _: None)
    other = replace(recipe.sources[0], file_sha256="0" * 64)
    assert not default.is_fresh(home, replace(recipe, sources=(other,)))
    assert not default.is_fresh(home, replace(recipe, command=(*recipe.command[:-1], "on ")))


def test_a_failure_is_one_line_and_keeps_what_was_there(recipe, home, repository):
    default.make([recipe], home, lambda _: None)
    broken = replace(recipe, command=(*recipe.command[:-1], "broken"))
    with pytest.raises(InputError, match=r"^making it failed: it broke$"):
        default.make([broken, replace(recipe, directory="other")], home, lambda _: None)
    assert default.is_fresh(home, recipe)
    assert [path.name for path in home.iterdir()] == ["made"]
    assert _calls(repository)[:1] == ["of "]


def test_all_is_found_again_without_doing_or_saying_anything(recipe, home, repository, monkeypatch):
    monkeypatch.setattr(default, "CHECKPOINT", recipe)
    monkeypatch.setattr(default, "CORPUS", replace(recipe, directory="corpus"))
    first = default.ensure_default_assets(lambda _: None)
    assert first == default.ensure_default_assets(lambda line: pytest.fail(f"said {line}"))
    assert len(_calls(repository)) == 2
    assert first.checkpoint == home / "made"
    assert first.tokenizer == home / "made" / "tokenizer.json"
    assert first.data_prefix == home / "corpus" / "wikipedia"
    assert first.text == home / "corpus" / "articles.jsonl"


def test_the_real_recipes_name_real_programs_and_sources():
    for recipe in (default.CHECKPOINT, default.CORPUS):
        module = default.REPOSITORY.joinpath(*recipe.command[0].split(".")).with_suffix(".py")
        assert module.is_file()
        names = {source.name for source in recipe.sources}
        assert all(part.format(output="x", **dict.fromkeys(names, "x")) for part in recipe.command)
