"""A tensor that did not change is not read twice, whatever became of the run before."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.quantscope.analysis import identity, resume
from megatron.quantscope.analysis.analyse import AnalysisError, analyse
from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.location import Location
from megatron.quantscope.report.progress import Progress
from tests.quantscope.analysis.captures import save, write_capture

FORMATS = ["mxfp8", "hifp8"]
NAME = "20241201_143022_{0:04d}_iter000_linear_L{0}_forward_pre_linear_bf16_rank0_sample0_input.pt"
KILLED = """
import os, signal, sys
from pathlib import Path
from megatron.quantscope.analysis import resume
from megatron.quantscope.analysis.analyse import analyse
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.progress import Progress

resume._PART_ROWS = 5
add, added = resume.RowStore.add, []
def adding(store, row):
    add(store, row)
    added.append(row)
    if len(added) == 13:
        os.kill(os.getpid(), signal.SIGKILL)
resume.RowStore.add = adding
source, target, formats = sys.argv[1:]
analyse(open_capture(source), Path(target), 1, Progress(shown=False), formats.split(","), details=False)
"""


@pytest.fixture
def loads(monkeypatch):
    """The paths that were opened, in order."""
    found, load = [], Location.load

    def loading(location):
        found.append(location.path)
        return load(location)

    monkeypatch.setattr(Location, "load", loading)
    return found


def run(capture, out, *, formats=FORMATS, **settings):
    """Analyse a capture in this process."""
    opened = capture if hasattr(capture, "records") else open_capture(capture)
    return analyse(opened, out, 1, Progress(shown=False), formats, details=False, **settings)


def bare_files(folder, count=4):
    folder.mkdir()
    for layer in range(count):
        save(folder / NAME.format(layer), torch.full((4, 32), float(layer + 1)).bfloat16())
    return folder


def test_a_second_run_reads_nothing_and_gives_the_same_bytes(tmp_path, loads):
    capture, out = write_capture(tmp_path / "in", layers=1), tmp_path / "out"
    first = run(capture, out)
    assert (len(loads), first.scan.files, first.scan.reused) == (32, 32, 0)
    before = (out / "summary.parquet").read_bytes()
    loads.clear()
    second = run(capture, out)
    assert (loads, second.scan.files, second.scan.reused) == ([], 0, 32)
    assert (out / "summary.parquet").read_bytes() == before
    assert sorted(path.name for path in out.iterdir()) == ["index.parquet", "summary.parquet"]


@pytest.mark.parametrize("save_format", ["pt", "segment"])
def test_a_capture_that_was_moved_is_known_by_its_checksums(tmp_path, loads, save_format):
    capture = write_capture(tmp_path / "in", layers=1, save_format=save_format)
    run(capture, tmp_path / "out")
    loads.clear()
    study = run(capture.rename(tmp_path / "moved"), tmp_path / "out")
    assert loads == []
    assert all(str(tmp_path / "moved") in file for file in study.summary["file"])


def test_a_file_that_changed_is_read_alone(tmp_path, loads):
    folder = bare_files(tmp_path / "in")
    run(folder, tmp_path / "out")
    loads.clear()
    save(folder / NAME.format(2), torch.full((4, 32), 7.0).bfloat16())
    study = run(folder, tmp_path / "out")
    assert loads == [folder / NAME.format(2)]
    assert study.summary["amax"].tolist() == [1.0, 2.0, 7.0, 4.0]
    (folder / NAME.format(0)).unlink()
    loads.clear()
    assert run(folder, tmp_path / "out").summary["amax"].tolist() == [2.0, 7.0, 4.0]
    assert loads == []


def test_bytes_that_several_runs_share_are_read_once(tmp_path, loads):
    for seed, quant_type in enumerate(("bf16", "mxfp8")):
        write_capture(tmp_path / "in", quant_type, layers=1, seed=seed)
    study = run(tmp_path / "in", tmp_path / "out")
    assert len(study.summary) == 64
    assert len(loads) == 64 - 4  # the weights
    assert (study.scan.files, study.scan.reused) == (60, 4)
    weights = study.summary[study.summary["tensor_name"] == "weight"].set_index(["quant_type", "site"])
    for column in ("rms", "mxfp8.error_squares", "key"):
        assert weights.loc["bf16", column].tolist() == weights.loc["mxfp8", column].tolist()


def test_when_the_first_of_equal_files_is_damaged_another_is_read(tmp_path):
    for seed, quant_type in enumerate(("bf16", "mxfp8")):
        write_capture(tmp_path / "in", quant_type, layers=1, seed=seed)
    capture = open_capture(tmp_path / "in")
    weight = next(record for record in capture.records if record.tensor_name == "weight")
    weight.path.write_bytes(b"PK\x03\x04" + b"\xff" * (weight.bytes - 26) + b"PK\x05\x06" + b"\xff" * 18)
    study = run(capture, tmp_path / "out")
    assert [line for line in study.problems if weight.path.name in line]
    assert len(study.summary) == 64  # its figures are known by then: they are those of the same bytes


def test_after_a_kill_only_the_last_part_is_read_again(tmp_path, loads):
    capture, out = write_capture(tmp_path / "in", layers=1), tmp_path / "out"
    program = [sys.executable, "-c", KILLED, str(capture), str(out), ",".join(FORMATS)]
    done = subprocess.run(program, cwd=os.getcwd(), env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    assert len(list((out / ".analysis").glob("part-*.parquet"))) == 2
    assert not (out / "summary.parquet").exists()
    run(capture, out)
    assert len(loads) == 32 - 10
    assert not (out / ".analysis").exists()
    run(capture, tmp_path / "afresh")
    assert (out / "summary.parquet").read_bytes() == (tmp_path / "afresh" / "summary.parquet").read_bytes()


def test_an_interrupt_loses_nothing(tmp_path, loads, monkeypatch):
    capture, out = write_capture(tmp_path / "in", layers=1), tmp_path / "out"
    add = resume.RowStore.add

    def interrupted(store, row):
        add(store, row)
        if len(loads) == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resume.RowStore, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(capture, out)
    loads.clear()
    run(capture, out)
    assert len(loads) == 12


def test_rows_without_a_wanted_treatment_are_read_again(tmp_path, loads):
    folder, out = bare_files(tmp_path / "in"), tmp_path / "out"
    read = []
    for formats in (["mxfp8"], ["mxfp8", "mxfp4"], ["mxfp4"], ["mxfp8", "mxfp4"], None, ["hifp8"], None):
        loads.clear()
        study = run(folder, out, formats=formats)
        read.append(len(loads))
        names = {column.partition(".")[0] for column in study.summary if "." in column}
        assert ("mxfp8" in names) == (formats is None or "mxfp8" in formats)
        assert ("mxfp4" in names) == (formats is None or "mxfp4" in formats)
    assert read == [4, 4, 0, 0, 4, 0, 0]
    assert not (out / ".analysis").exists()


def test_what_a_selection_leaves_out_is_kept(tmp_path, loads):
    capture, out = open_capture(write_capture(tmp_path / "in", layers=2)), tmp_path / "out"
    run(capture, out)
    loads.clear()
    for _ in range(3):
        few = replace(capture, records=[record for record in capture.records if record.layer_idx == 1])
        assert len(run(few, out, selection="layer 1").summary) == 32
    assert len(run(capture, out, formats=FORMATS).summary) == 64
    assert loads == []
    assert len(list((out / ".analysis").glob("*"))) <= 2  # the same part is kept once


def test_another_version_reads_everything(tmp_path, loads, monkeypatch):
    folder = bare_files(tmp_path / "in")
    run(folder, tmp_path / "out")
    loads.clear()
    monkeypatch.setattr(identity, "VERSION", identity.VERSION + 1)
    run(folder, tmp_path / "out")
    assert len(loads) == 4


def test_damaged_and_foreign_parts_are_told_and_left_alone(tmp_path, caplog):
    folder, out = bare_files(tmp_path / "in"), tmp_path / "out"
    parts = out / ".analysis"
    parts.mkdir(parents=True)
    (parts / "part-1.parquet").write_bytes(b"PAR1 and then nothing")
    pd.DataFrame({"a": [1]}).to_parquet(parts / "part-2.parquet")
    (parts / "part-3.parquet").write_bytes(b"")
    (parts / ".part-4.parquet.writing-1").write_bytes(b"half")
    os.utime(parts / ".part-4.parquet.writing-1", (0, 0))
    study = run(folder, out, formats=None)
    assert study.summary["amax"].tolist() == [1.0, 2.0, 3.0, 4.0]
    told = [message for message in caplog.messages if "left out" in message]
    assert [f"part-{number}.parquet" in message for number, message in enumerate(told, 1)] == [True] * 3
    assert sorted(path.name for path in parts.iterdir()) == [f"part-{number}.parquet" for number in (1, 2, 3)]


def test_rows_come_in_the_order_of_the_records_whatever_the_order_of_reading(tmp_path, monkeypatch):
    capture, out = open_capture(write_capture(tmp_path / "in", layers=2)), tmp_path / "out"
    monkeypatch.setattr(resume, "_PART_ROWS", 7)
    monkeypatch.setattr(resume, "_GROUP_ROWS", 10)
    order = np.random.default_rng(0).permutation(len(capture.records))
    for start in (0, 40):
        shuffled = [capture.records[place] for place in order[start : start + 40]]
        run(replace(capture, records=shuffled), out, selection="some")
    study = run(capture, out)
    run(capture, tmp_path / "afresh")
    assert (out / "summary.parquet").read_bytes() == (tmp_path / "afresh" / "summary.parquet").read_bytes()
    assert study.summary["file"].tolist() == list(dict.fromkeys(str(record.path) for record in capture.records))


def test_nothing_readable_leaves_the_summary_of_before(tmp_path):
    folder, out = bare_files(tmp_path / "in"), tmp_path / "out"
    run(folder, out)
    before = (out / "summary.parquet").read_bytes()
    capture = open_capture(folder)
    for record in capture.records:
        record.path.unlink()
    with pytest.raises(AnalysisError, match="none of the 4 files"):
        run(capture, out)
    assert (out / "summary.parquet").read_bytes() == before
