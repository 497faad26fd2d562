import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from script.driver import collection, summary, training
from script.driver.environment import ROOT
from script.driver.plan import Total

FILES, ROWS = 5, 6  # of a micro-batch of the fake trainer


def run(capsys, *argv):
    code = collection.main(argv)
    output = capsys.readouterr()
    return code, output.out, output.err


def table_of(text):
    """{type: cells} of the table printed last."""
    below = text.rpartition("\u2500")[2]
    rows = [re.split(r"\s{2,}", line.strip()) for line in below.splitlines() if line.strip()]
    return {row[0]: row[1:] for row in rows}


def test_single(capsys, fake_trainer, tmp_path):
    fake_trainer("good")
    code, out, err = run(capsys, "quick", "hifp8", "--control-iter", "3", "--collect-micro-batches", "2")
    assert (code, err) == (0, "")
    assert "a micro-batch (128 tokens, 4 layers): 128 files" in out
    assert "hifp8: 3 x 2 micro-batches: 864 rows, 720 files" in out
    row = table_of(out)["hifp8"]
    assert row[:5] == ["3", "6", str(6 * ROWS), str(6 * FILES), "30 kB"]
    assert (row[5], row[7]) == ("1.500", "ok")
    (log,) = (tmp_path / "enhanced_tensor_logs/hifp8/runs").glob("*/train.log")
    assert "--quant-type hifp8 --save-tensors" in log.read_text()


def test_batch_takes_every_type_from_the_same_start(capsys, fake_trainer, tmp_path, monkeypatch):
    fake_trainer("good")
    monkeypatch.setattr(collection, "prepare", lambda *_: collection.trainer.QUICK_INPUTS)
    code, out, _ = run(capsys, "batch")
    assert code == 0
    assert list(table_of(out)) == ["bf16", "fp16", "mxfp8", "mxfp4", "hifp8"]
    logs = list(tmp_path.glob("enhanced_tensor_logs/*/runs/*/train.log"))
    commands = {re.sub(r"--quant-type \w+", "", log.read_text()) for log in logs}
    assert (len(logs), len(commands)) == (5, 1)


def test_batch_goes_on_after_a_failure(capsys, fake_trainer, monkeypatch):
    fake_trainer("good")
    monkeypatch.setenv("FAKE_BROKEN_TYPE", "mxfp8")
    monkeypatch.setattr(collection, "prepare", lambda *_: collection.trainer.QUICK_INPUTS)
    code, out, err = run(capsys, "batch")
    assert code == 1
    assert err.count("\n") == 1
    assert "error: mxfp8: the trainer ended with exit code 1: RuntimeError: the loss is NaN (log: " in err
    results = {name: row[-1] for name, row in table_of(out).items()}
    assert results == {"bf16": "ok", "fp16": "ok", "mxfp8": "failed", "mxfp4": "ok", "hifp8": "ok"}


@pytest.mark.parametrize(
    ("behaviour", "exit_code", "line"),
    [
        ("usage", 2, "exit code 2: pretrain_gpt.py: error: --foo is not allowed"),
        ("stopped", 1, "collecting ended early: No space left on device"),
        ("short", 1, "1 of 2 iterations were collected"),
        ("torn", 1, "0 of 2 iterations were collected"),
    ],
)
def test_a_run_that_did_not_collect_is_a_failure(capsys, fake_trainer, behaviour, exit_code, line):
    fake_trainer(behaviour)
    code, out, err = run(capsys, "quick", "--control-iter", "2")
    assert code == exit_code
    assert line in err
    assert err.count("\n") == 1
    assert table_of(out)["mxfp8"][-1] == "failed"


@pytest.mark.parametrize(("behaviour", "exit_code"), [("good", 0), ("crash", 1), ("usage", 2)])
def test_a_dry_run_speaks_for_itself_and_leaves_nothing(capfd, fake_trainer, tmp_path, behaviour, exit_code):
    """There are no files to be expected, no log, and no plan that could say something else."""
    fake_trainer(behaviour)
    code, out, _ = run(capfd, "quick", "--", "--tensor-dry-run")
    assert code == exit_code
    assert "--tensor-dry-run" in re.search("^arguments: .*$", out, re.MULTILINE).group(0)
    assert "128 files" not in out
    assert not list(tmp_path.iterdir())


def test_dry_runs_of_a_batch(capfd, fake_trainer, monkeypatch):
    fake_trainer("good")
    monkeypatch.setattr(collection, "prepare", lambda *_: collection.trainer.QUICK_INPUTS)
    code, out, _ = run(capfd, "batch", "--", "--tensor-dry-run")
    assert code == 0
    assert re.findall(r"--quant-type (\w+)", out) == ["bf16", "fp16", "mxfp8", "mxfp4", "hifp8"]


def test_the_verdict_on_interference_is_shown(capsys, fake_trainer):
    fake_trainer("good")
    code, out, _ = run(capsys, "quick", "--", "--tensor-check-interference")
    assert code == 0
    assert "mxfp8: arguments: " in out  # whatever the trainer prints
    assert table_of(out)["mxfp8"][-1] == "ok"


def test_a_run_without_progress_is_stopped(capsys, fake_trainer, tmp_path, monkeypatch):
    fake_trainer("hang")
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    code, _, err = run(capsys, "quick", "--stall-timeout", "1.5")
    assert code == 1
    assert "no progress for 1.5 s: stopped (--stall-timeout)" in err
    assert not psutil.pid_exists(int((tmp_path / "pids").read_text()))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["batch", "mxfp8"], "batch runs bf16, fp16, mxfp8, mxfp4, hifp8; for mxfp8 alone, use single"),
        (["quick", "--data-path", "x"], "leave --data-path out"),
        (["quick", "--", "--no-such-flag"], "the trainer has no flag --no-such-flag"),
        (["quick", "--", "--num-attention-heads", "7"], "--num-attention-heads 7"),
        (["single", "--data-path", "/nowhere"], "/nowhere is no data"),
        (["single", "--checkpoint-path", "/"], "/ holds no checkpoint"),
        (["quick", "--nproc", "2", "--", "--tensor-model-parallel-size", "4"], "--nproc 2 is not a multiple"),
    ],
)
def test_wrong_usage(capsys, fake_trainer, argv, line, tmp_path):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1
    assert not (tmp_path / "enhanced_tensor_logs").exists()


def test_a_directory_that_can_not_be_written(capsys, fake_trainer, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = run(capsys, "quick", "--tensor-dir", str(tmp_path / "file" / "below"))
    assert code == 1
    assert err.count("\n") == 1
    assert str(tmp_path / "file") in err


def test_batch_goes_on_when_one_type_can_not_be_written(capsys, fake_trainer, tmp_path, monkeypatch):
    fake_trainer("good")
    monkeypatch.setattr(collection, "prepare", lambda *_: collection.trainer.QUICK_INPUTS)
    (tmp_path / "enhanced_tensor_logs").mkdir()
    (tmp_path / "enhanced_tensor_logs" / "fp16").touch()
    code, out, err = run(capsys, "batch")
    assert (code, err.count("\n")) == (1, 1)
    assert [row[-1] for row in table_of(out).values()] == ["ok", "failed", "ok", "ok", "ok"]


def test_what_does_not_fit_on_the_disk_is_not_started(capsys, fake_trainer, tmp_path, monkeypatch):
    usage = summary.shutil.disk_usage(tmp_path)._replace(free=17_000_000)
    monkeypatch.setattr(summary.shutil, "disk_usage", lambda _: usage)
    code, _, err = run(capsys, "quick")
    assert code == 1
    assert re.search(r"has 17 MB free and 18\.\d MB are needed; give another --tensor-dir", err)
    assert not (tmp_path / "enhanced_tensor_logs").exists()
    assert run(capsys, "quick", "--", "--tensor-filter", "layers=0")[0] == 0  # how much that keeps is not known


def test_a_filter_makes_the_plan_an_upper_bound(capsys, fake_trainer):
    fake_trainer("good")
    _, out, _ = run(capsys, "quick", "--", "--tensor-filter", "layers=0")
    assert "at most 128 files" in out


def test_the_budget_is_named_when_it_will_end_collecting(capsys, fake_trainer):
    fake_trainer("good")
    _, out, _ = run(capsys, "quick", "--", "--tensor-budget-gb", "0.001")
    assert "collecting will end at 0.001 GB" in out


def test_unquantised_runs_are_watched_where_they_are_kept(fake_trainer, tmp_path):
    options = collection_options("quick", "none", "--dtype", "fp32")
    ready = training.job(options, "none", collection.trainer.QUICK_INPUTS)
    assert ready.folder == tmp_path / "enhanced_tensor_logs" / "fp32"
    assert ready.plan.first == Total(rows=144, files=128, payload=ready.plan.first.payload)


def collection_options(*argv):
    from script.driver.options import COLLECTION, parse

    return parse(COLLECTION, argv)


def test_the_complaint_is_found_among_the_last_lines():
    lines = ["Traceback (most recent call last):", "ValueError: bad shape", "", "[W socket.cpp] closing"]
    assert training.complaint(lines) == "ValueError: bad shape"
    assert training.complaint(["one", "two", " "]) == "two"
    assert training.complaint([]) == "it said nothing"
    torchrun = ["E1121 torch/distributed/elastic/multiprocessing/api.py:1002] failed", "ChildFailedError: rank 0"]
    assert training.complaint([*lines, *torchrun]) == "ValueError: bad shape"


DRIVE = """
import sys
from pathlib import Path
from script.driver import collection, process, trainer
trainer.TRAINER = Path({fake!r})
process.GRACE_SECONDS = 0.5
sys.exit(collection.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_no_process_behind(tmp_path, number):
    pids_file = tmp_path / "pids"
    code = DRIVE.format(fake=str(Path(__file__).with_name("fake_trainer.py")))
    environment = os.environ | {"FAKE_TRAINER": "family", "FAKE_PIDS": str(pids_file), "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [sys.executable, "-c", code, "quick"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (pids_file.exists() and pids_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(word) for word in pids_file.read_text().split()]
    driver.send_signal(number)
    _, err = driver.communicate(timeout=30)
    assert driver.returncode == 128 + number
    assert err == f"run_tensor_collection.sh: stopped by {number.name}; what was collected is kept\n"
    assert len(pids) == 3
    alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert alive == []
