"""Files cut into pieces: the documents are those of the whole file whatever the cut, and reading goes on anywhere."""

import bz2
import gzip
import json
from itertools import chain

import pytest

from script.data import pieces
from script.data.articles import articles_of, read_articles
from script.data.command_line import InputError
from script.data.inputs import input_files
from script.data.pieces import read_pieces


def page(number):
    return (
        f"<page><title>T{number}</title><ns>0</ns><revision><text>Text {number} of a page.</text></revision></page>\n"
    )


HEAD, TAIL = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">\n<siteinfo/>\n', "</mediawiki>\n"
PAGES = [page(number) for number in range(12)]
CONTENT = {
    ".xml": HEAD + "".join(PAGES) + TAIL,
    ".jsonl": "".join(json.dumps({"text": f"line {number}"}) + "\n" * (1 + number % 2) for number in range(30)),
    ".txt": "one document",
}
PACK = {"": bytes, ".bz2": bz2.compress, ".gz": gzip.compress}


def multistream(*parts):
    return b"".join(bz2.compress(part.encode()) for part in parts)


@pytest.fixture
def documents():
    """`documents(path, start)` -> the texts from a place on."""
    return lambda path, start=None: [a.text for piece in read_pieces(path, start) for a in articles_of(piece)]


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("size", [1, 50, 300, 10**6])
def test_reading_goes_on_after_any_piece(tmp_path, monkeypatch, documents, kind, packing, size):
    path = tmp_path / f"a{kind}{packing}"
    path.write_bytes(PACK[packing](CONTENT[kind].encode()))
    whole = documents(path)
    assert len(whole) == {".xml": 12, ".jsonl": 30, ".txt": 1}[kind]
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    cut = list(read_pieces(path))
    texts = [[article.text for article in articles_of(piece)] for piece in cut]
    assert list(chain.from_iterable(texts)) == whole
    assert len(cut) == 1 or size < 10**6
    for number, piece in enumerate(cut):
        assert documents(path, piece.end) == list(chain.from_iterable(texts[number + 1 :]))
        assert 0 < piece.consumed <= path.stat().st_size


def test_the_lines_of_a_later_piece_have_their_numbers(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(CONTENT[".jsonl"] + "broken\n")
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    with pytest.raises(InputError, match=f"line {CONTENT['.jsonl'].count(chr(10)) + 1} is not JSON"):
        list(read_articles(path))


class TestMultistream:
    def test_each_stream_is_a_piece_that_a_worker_unpacks(self, tmp_path, documents):
        path = tmp_path / "a.xml.bz2"
        path.write_bytes(multistream(HEAD, "".join(PAGES[:5]), "".join(PAGES[5:]), TAIL))
        cut = list(read_pieces(path))
        assert [piece.packed for piece in cut] == [True] * 4
        assert [len(list(articles_of(piece))) for piece in cut] == [0, 5, 7, 0]
        for piece, left in zip(cut, (12, 7, 0, 0), strict=True):
            assert len(documents(path, piece.end)) == left

    def test_streams_that_are_cut_anywhere_are_read_as_one(self, tmp_path, documents):
        """As parallel packers write them."""
        text = CONTENT[".xml"]
        path = tmp_path / "a.xml.bz2"
        path.write_bytes(multistream(text[:300], text[300:700], text[700:]))
        assert not any(piece.packed for piece in read_pieces(path))
        assert len(documents(path)) == 12

    @pytest.mark.parametrize(("parts", "cut"), [(3, 0), (4, 5)])
    def test_a_truncated_one_is_named(self, tmp_path, parts, cut):
        streams = (HEAD, "".join(PAGES[:5]), "".join(PAGES[5:]), TAIL)[:parts]
        content = multistream(*streams)
        path = tmp_path / "a.xml.bz2"
        path.write_bytes(content[: len(content) - cut])
        with pytest.raises(InputError, match=r"a\.xml\.bz2: can not be read as \.xml"):
            list(read_articles(path))


class TestInputs:
    def test_files_directories_and_patterns(self, tmp_path):
        names = ("b/2.jsonl", "b/deep/1.xml.bz2", "b/notes.pdf", "a.txt", "c.txt.gz")
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()

        def found(*arguments):
            return [str(f.relative_to(tmp_path)) for f in input_files([str(tmp_path / a) for a in arguments])]

        assert found("b") == ["b/2.jsonl", "b/deep/1.xml.bz2"]
        assert found("*.txt*") == ["a.txt", "c.txt.gz"]
        assert found("b/**/*.bz2", "a.txt") == ["b/deep/1.xml.bz2", "a.txt"]
        assert found("b/notes.pdf") == ["b/notes.pdf"]

    @pytest.mark.parametrize(
        ("name", "message"), [("absent.txt", "absent.txt: no such file"), ("*.x", "no such file"), (".", r"no \*\.xml")]
    )
    def test_nothing_by_a_name(self, tmp_path, monkeypatch, name, message):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match=message):
            input_files([name])
