"""What ends an analysis is told in one line; files that tables can not name are left out."""

import errno
import os
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from megatron.quantscope.analysis import analyse as module
from megatron.quantscope.analysis.analyse import AnalysisError, analyse
from megatron.quantscope.analysis.errors import printable, told_in_one_line
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.progress import Progress
from tests.quantscope.analysis.captures import save, write_capture

NAME = "20241201_143022_{0:04d}_iter000_linear_L{0}_forward_pre_linear_bf16_rank0_sample0_{1}.pt"


class ConnectionLost(OSError):
    """As Dask's CommClosedError: without a number."""


def run(directory, out, **settings):
    return analyse(open_capture(directory), out, 1, Progress(shown=False), ["mxfp8"], **settings)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "out/summary.parquet"),
            "can not write out/summary.parquet: P",
        ),
        (FileExistsError(errno.EEXIST, "File exists", "out"), "can not write out: File exists"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "above"), "can not read above: Not a directory"),
        (FileNotFoundError(errno.ENOENT, "No such file", "in/a.pt"), "can not read in/a.pt: No such file"),
        (FileNotFoundError(errno.ENOENT, "No such file", os.fsdecode(b"in/\xff.pt")), r"can not read in/\\udcff.pt: N"),
        (OSError(errno.ENOSPC, "No space left on device"), "can not write out: No space left on device"),
        (ConnectionLost("in <TCP>: closed\nmore"), "it broke off: ConnectionLost: in <TCP>: closed$"),
        (TimeoutError(), "it broke off: TimeoutError: TimeoutError"),
        (BrokenProcessPool("a\nb"), "a worker was killed, most likely for want of memory: try fewer than 3"),
    ],
)
def test_one_line_says_what_failed_and_at_which_file(tmp_path, monkeypatch, error, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AnalysisError, match=expected) as told, told_in_one_line(tmp_path.__class__("out"), 3):
        raise error
    assert "\n" not in str(told.value)


def test_an_error_of_the_program_is_not_dressed_up(tmp_path):
    with pytest.raises(KeyError), told_in_one_line(tmp_path, 1):
        raise KeyError("x")


def test_findings_are_looked_for_under_the_same_guard(tmp_path, monkeypatch):
    directory = write_capture(tmp_path / "in", layers=1)

    def finding(study):
        os.utime(tmp_path / "out" / "summary.parquet", ns=(0, 0))  # as another run that writes there
        return list(study.summary["top"])

    monkeypatch.setattr(module, "_findings", finding)
    with pytest.raises(AnalysisError, match="was replaced while it was being read"):
        run(directory, tmp_path / "out", details=False)
    monkeypatch.setattr(module, "_findings", lambda study: (tmp_path / "none").read_text())
    with pytest.raises(AnalysisError, match=r"can not read .*none: No such file"):
        run(directory, tmp_path / "out", details=False)


def test_a_name_that_is_not_utf8_is_a_problem_and_the_rest_is_read(tmp_path):
    (tmp_path / "in").mkdir()
    names = [NAME.format(0, "input"), os.fsdecode(NAME.format(1, "in%put").encode().replace(b"%", b"\xff"))]
    for name in names:
        torch.save(torch.ones(4, 32), tmp_path / "plain.pt")
        os.replace(tmp_path / "plain.pt", tmp_path / "in" / name)
    study = run(tmp_path / "in", tmp_path / "out")
    assert study.summary["file"].tolist() == study.index["file"].tolist() == [str(tmp_path / "in" / names[0])]
    assert study.problems == [f"{printable(names[1])}: its name is not UTF-8, which tables are written in: rename it"]
    assert r"in\udcffput" in study.problems[0].encode().decode()


def test_where_no_name_is_utf8_that_is_why_nothing_can_be_read(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    save(folder / NAME.format(0, "input"), torch.ones(4, 32))
    with pytest.raises(AnalysisError, match=r"none of the 1 files in .* can be read: its name is not UTF-8"):
        run(folder, tmp_path / "out")
