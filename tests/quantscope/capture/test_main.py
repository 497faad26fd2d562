"""The command line: list, verify, export."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.__main__ import main
from tests.quantscope.capture.handwritten import RUN, Writer

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ("list", "verify", "export")


@pytest.fixture
def root(tmp_path):
    writer = Writer(tmp_path / "in", capture={"mode": "tensors", "save_format": "segment"})
    writer.add(torch.arange(1000.0))
    writer.commit().close()
    return tmp_path / "in"


def program(*arguments):
    command = [sys.executable, "-m", "megatron.quantscope.capture", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_list(root, capsys):
    assert main(["list", str(root)]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    size = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
    assert line.split() == [
        "mxfp8", RUN, "2026-11-21", "12:00:00", "tensors", "segment", "1", "1", "1", f"{size:,}", "closed",
    ]  # fmt: skip
    assert heading.split() == ["type", "run", "began", "mode", "format", "ranks", "iterations", "rows", "bytes", "end"]
    assert heading.index("bytes") == line.index(f"{size:,}")


@pytest.mark.parametrize(
    ("end", "said"), [([], "not closed"), ([{"kind": "stopped", "reason": "disk full"}], "stopped early")]
)
def test_list_tells_how_a_run_ended(root, capsys, end, said):
    writer = Writer(root, quant_type="bf16")
    writer.add(torch.ones(2), kept=False)
    writer.lines += end
    writer.commit()
    assert main(["list", str(root)]) == 0
    bf16, mxfp8 = capsys.readouterr().out.splitlines()[1:]
    assert bf16.startswith("bf16 ")
    assert bf16.endswith(said)
    assert mxfp8.endswith(" closed")


def test_verify(root, capsys):
    assert main(["verify", str(root)]) == 0
    assert capsys.readouterr().out == "1 rows and 4,000 bytes are as they were written, no findings\n"
    next(root.rglob("*.safetensors")).unlink()
    assert main(["verify", str(root), "--run", RUN]) == 1
    finding, total = capsys.readouterr().out.splitlines()
    assert finding.startswith(f"missing  mxfp8/runs/{RUN}/iter000_rank0_000.safetensors: missing, and with it")
    assert total.endswith("1 finding")


def test_export(root, tmp_path, capsys):
    assert main(["export", str(root), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("1 rows in 1 files of ")
    capture = open_capture(tmp_path / "out")
    assert torch.equal(capture.load(capture.records[0]), torch.arange(1000.0))
    assert main(["export", str(root), str(tmp_path / "out"), "--run", RUN]) == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["none", "file", "empty", "file/below"])
def test_a_bad_path_is_one_line(tmp_path, capsys, command, place):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    places = [str(tmp_path / place)] + [str(tmp_path / "out")] * (command == "export")
    assert main([command, *places]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert place.split("/")[0] in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["mend", "."], ["verify"], ["list", ".", "--run", "x"], ["export", "."]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_it_runs_as_a_program(root, tmp_path):
    assert program("verify", root).returncode == 0
    result = program("verify", tmp_path / "none")
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"], ["export", "--help"]])
def test_help_needs_no_heavy_import(arguments):
    code = f"""
import sys
from megatron.quantscope.capture.__main__ import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0
assert not {{"torch", "numpy", "pandas"}} & set(sys.modules)
"""
    start = time.process_time()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert time.process_time() - start < 1
