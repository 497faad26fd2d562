"""Documents out of dumps, JSON lines and plain text."""

import bz2
import gzip
import json

import pytest

from script.data.articles import Article, read_articles
from script.data.command_line import InputError


def _read(path, **options):
    return [(article.title, article.text) for article in read_articles(path, **options)]


def test_dump_gives_the_text_of_its_articles(dump, articles):
    assert _read(dump) == articles


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".bz2", bz2.compress), (".gz", gzip.compress)])
@pytest.mark.parametrize("kind", [".xml", ".jsonl", ".txt"])
def test_packed_or_not(tmp_path, dump_text, articles, kind, suffix, pack):
    lines = "".join(Article(*article).to_json_line() for article in articles)
    text = articles[1][1]
    content, expected = {
        ".xml": (dump_text, articles),
        ".jsonl": (lines, articles),
        ".txt": (text, [("", text)]),
    }[kind]
    path = tmp_path / f"some.name{kind}{suffix}"
    path.write_bytes(pack(content.encode()))
    assert _read(path) == expected


def test_json_key(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": " "}\n{"title": "T", "body": "two"}\n')
    assert _read(path, text_key="body") == [("", "one"), ("T", "two")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n["text"]\n', "line 2 has no text under the key 'text'"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 has no text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "ab \\ud800 c"}\n', "line 2 has half a surrogate pair"),
        ("a.jsonl", b'{"title": "\\udfff", "text": "x"}\n', "line 1 has half a surrogate pair"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 200_000, "line 2 is not JSON"),
        ("a.txt.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 40, "can not be read as plain text"),
        ("a.xml", b"", "can not be read as .xml"),
        ("a.txt", b"\xff\xfe\x00", "can not be read as plain text"),
        ("a.xml.bz2", b"not packed", "a.xml.bz2"),
        ("a.txt.gz", b"not packed", "a.txt.gz"),
    ],
)
def test_broken_input_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        _read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0.9, 0.5])
@pytest.mark.parametrize("pack", [bytes, bz2.compress])
def test_a_truncated_dump_is_named(tmp_path, dump_text, size, pack):
    path = tmp_path / ("a.xml" if pack is bytes else "a.xml.bz2")
    content = pack(dump_text.encode())
    path.write_bytes(content[: int(size * len(content))])
    with pytest.raises(InputError, match=r"can not be read as \.xml"):
        _read(path)


def test_pairs_of_surrogates_are_characters(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "ab \ud83c\udf5e c"}')
    assert _read(path) == [("", "ab \U0001f35e c")]


def test_a_reference_to_half_a_surrogate_pair_is_replaced(tmp_path, dump_text):
    path = tmp_path / "a.xml"
    path.write_text(dump_text.replace("Salt: 42 g", "Salt: &amp;#xD800; g"))
    assert _read(path)[1][1] == " Use \nSalt: \ufffd g, caf\u00e9."


def test_what_the_system_says_of_reading_is_no_fault_of_the_content(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(FileNotFoundError, match="No such file") as caught:
        _read(path)
    assert caught.value.filename == str(path)


def test_json_line_round_trip(tmp_path):
    article = Article('Ti"tle', "line\nbreak \u2028 and \u00e9")
    path = tmp_path / "a.jsonl"
    path.write_text(article.to_json_line(), encoding="utf-8")
    assert list(read_articles(path)) == [article]
    assert json.loads(path.read_text(encoding="utf-8"))["title"] == article.title


def test_pages_are_read_one_by_one(tmp_path, dump_text):
    """The first article comes before the dump's end is read: a broken end does not keep it back."""
    path = tmp_path / "a.xml"
    path.write_text(dump_text.replace("</mediawiki>", "<page>" * 3))
    documents = read_articles(path)
    assert next(documents).title == "Bread"
