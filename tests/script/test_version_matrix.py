"""The version matrix: which Python a row needs, where its packages come from, and the table."""

from pathlib import Path

import pytest

from script import version_matrix
from script.version_matrix import MatrixError, main


@pytest.mark.parametrize(
    ("version", "python"), [("0.14.0", "3.11"), ("0.16.2", "3.11"), ("0.17.0", "3.12"), ("0.19.2", "3.12")]
)
def test_the_python_of_a_version(version, python):
    assert version_matrix._python_of(version) == python


def test_a_checkout_says_its_version(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 2\nPRE_RELEASE = ''\n")
    assert version_matrix._checkout_version(tmp_path) == "0.16.2"
    with pytest.raises(MatrixError, match="is no Megatron-LM checkout"):
        version_matrix._checkout_version(tmp_path / "nowhere")


def test_a_version_that_the_environment_lacks_comes_before_it(tmp_path, monkeypatch):
    commands = []

    def run(command, environment):
        commands.append(command)
        return "0.16.1\n"

    monkeypatch.setattr(version_matrix, "_output", run)
    assert version_matrix._package("0.16.1", "python", tmp_path) is None
    assert version_matrix._package("0.14.0", "python", tmp_path) == tmp_path / "megatron-core-0.14.0"
    assert commands[-1][-5:-1] == ["-q", "--no-deps", "--target", str(tmp_path / "megatron-core-0.14.0")]
    assert commands[-1][-1] == "megatron-core==0.14.0"


def test_an_interpreter_given_by_hand_is_taken(tmp_path):
    assert version_matrix._interpreter("3.12", tmp_path, ["3.12=/opt/python"]) == "/opt/python"


def test_a_python_that_is_nowhere_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(version_matrix.ROWS, "0.18.0", "3.99")
    assert main(["--rows", "0.18.0", "--directory", str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "version_matrix.py: error: no python3.99 on the PATH; give one by --python 3.99=PATH"


def test_the_table_lines_up():
    lines = version_matrix._table([("0.14.0", *"1234567"), ("0.16.2 (checkout)", *"1234567")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("| megatron-core     | Python |")


def test_the_tests_are_there():
    assert all((Path(version_matrix.ROOT) / path).is_dir() for path in version_matrix.TESTS)
