"""The version of the megatron-core underneath: read from its text, refused in one line outside the range."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron.core
from megatron.core import _versions

ROOT = Path(__file__).resolve().parents[2]
RANGE = "this tree needs >= 0.14, < 0.20"


def checkout(path, major, minor, patch, pre_release=""):
    """A Megatron-LM checkout that fails when any of it runs."""
    core = path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('ran')\n")
    lines = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = '{pre_release}'\nprint('ran')\n"
    (core / "package_info.py").write_text(f"# MINOR = 15\n{lines}")
    return core


@pytest.mark.parametrize("minor", range(14, 20))
def test_the_range_is_accepted(tmp_path, minor):
    _versions.require_supported(str(checkout(tmp_path, 0, minor, 3)))


@pytest.mark.parametrize(
    ("version", "name"),
    [((0, 13, 1), "0.13.1"), ((0, 20, 0), "0.20.0"), ((0, 20, 0, "rc0"), "0.20.0rc0"), ((1, 15, 0), "1.15.0")],
)
def test_other_versions_are_refused_by_name(tmp_path, version, name):
    core = checkout(tmp_path, *version)
    with pytest.raises(ImportError) as refused:
        _versions.require_supported(str(core))
    assert str(refused.value) == f"megatron-core {name} is not supported: {RANGE}; it comes from {core}"


@pytest.mark.parametrize("text", [None, "", "MAJOR = 0\nMINOR = x\nPATCH = 1\n"])
def test_no_version_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "package_info.py").write_text(text)
    with pytest.raises(ImportError, match=r"no version in .*package_info\.py"):
        _versions.require_supported(str(tmp_path))


def test_the_installed_one_has_the_version_it_says():
    fields = _versions._fields(megatron.core.__path__[1])
    assert megatron.core.__version__.startswith(".".join(fields[name] for name in ("MAJOR", "MINOR", "PATCH")))


def test_the_trainer_refuses_a_checkout_in_one_line_with_exit_code_2(tmp_path):
    core = checkout(tmp_path, 0, 13, 1)
    flags = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    flags += " --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    flags += " --tokenizer-type NullTokenizer --vocab-size 63"
    result = subprocess.run(
        [sys.executable, ROOT / "pretrain_gpt.py", *flags.split()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    line = f"pretrain_gpt.py: error: megatron-core 0.13.1 is not supported: {RANGE}; it comes from {core}"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line + "\n")
