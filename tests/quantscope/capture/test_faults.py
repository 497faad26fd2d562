"""What goes wrong: the disk, the budget, the writer, the process. Training goes on or stops as asked, with one message,
and what was collected stays readable."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron.quantscope.capture import CaptureError, ParallelCoordinates, folder, open_capture
from megatron.quantscope.capture import rows as rows_module
from megatron.quantscope.capture.writer import BackgroundWriter
from tests.quantscope.capture.conftest import (
    LINEAR,
    ROWS_A_PASS,
    linear_tensors,
    run_iteration,
    show_backward,
    show_forward,
)

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 20


def fail_after(monkeypatch, files, error):
    """The disk takes `files` tensor files and then raises."""
    save, count = folder.save_tensor_file, iter(range(files))

    def limited(path, content):
        if next(count, None) is None:
            Path(path).write_bytes(b"half a file")
            raise error
        save(path, content)

    monkeypatch.setattr(folder, "save_tensor_file", limited)


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


class TestDisk:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
    def test_a_full_disk_ends_collecting_and_training_goes_on(self, open_session, monkeypatch, caplog, code):
        fail_after(monkeypatch, 8, OSError(code, os.strerror(code)))
        session = open_session(control_iter=3)
        for iteration in range(3):
            run_iteration(session, iteration)
        assert session.finished  # at the same iteration as with an empty disk
        session.close()
        assert os.strerror(code) in session.failed
        assert len(errors_in(caplog)) == 1
        assert "training goes on" in errors_in(caplog)[0]
        capture = open_capture(session.config.directory)
        assert len(capture.records) >= ROWS_A_PASS
        assert [capture.load(record) is not None for record in capture.records]
        assert not any("damaged" in problem or "missing" in problem for problem in capture.problems)
        assert any("collecting ended early" in problem for problem in capture.problems)
        assert 1 not in capture.commits["mxfp8"]
        assert session.summary().iterations == len(capture.commits["mxfp8"]) < 3
        assert not list((session.config.directory / "mxfp8").glob(".*"))

    def test_stop_ends_training_after_the_iteration(self, open_session, monkeypatch, caplog):
        fail_after(monkeypatch, 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        session = open_session(control_iter=0, stop_on_error=True)

        def train():
            for iteration in range(1000):
                run_iteration(session, iteration)
                time.sleep(0.001)

        with pytest.raises(CaptureError, match="No space left on device"):
            train()
        session.close()
        assert len(errors_in(caplog)) == 1
        assert "training stops after this iteration" in errors_in(caplog)[0]

    def test_the_budget(self, open_session, caplog):
        budget = 60_000
        session = open_session(control_iter=0, budget_bytes=budget)
        for iteration in range(50):
            run_iteration(session, iteration)
        session.close()
        assert "the budget of 6e-05 GB a rank is spent; raise --tensor-budget-gb" in session.failed
        assert len(errors_in(caplog)) == 1
        written = sum(path.stat().st_size for path in session.config.directory.rglob("*.pt"))
        assert budget / 2 < written <= budget
        assert session.summary().bytes == written

    def test_a_tensor_larger_than_what_is_left_is_not_begun(self, open_session):
        session = open_session(budget_bytes=60_000)
        run_iteration(session, 0, tensors=dict.fromkeys(linear_tensors(), torch.zeros(100_000)))
        session.close()
        assert "budget" in session.failed
        assert list(session.config.directory.rglob("*.pt")) == []

    def test_the_budget_is_shared_by_the_ranks(self, open_session):
        session = open_session(parallel=ParallelCoordinates(dp_size=4), control_iter=0, budget_bytes=240_000)
        for iteration in range(50):
            run_iteration(session, iteration)
        session.close()
        assert sum(path.stat().st_size for path in session.config.directory.rglob("*.pt")) <= 60_000

    def test_an_estimate_never_falls_short_of_the_file(self, open_session):
        """The budget trusts it: long metadata, an empty tensor."""
        session = open_session()
        formats = {f"gemm{number}": {"operand": "x" * 40} for number in range(200)}
        site = session.site(**(LINEAR | {"formats": formats}))
        session.begin_iteration(0)
        session.begin_micro_batch(0, range(5000))
        site.tap()("forward", "pre", "input", torch.zeros(0))
        session.end_iteration({})
        session.close()
        record = open_capture(session.config.directory).records[0]
        metadata = torch.load(record.path, weights_only=True)["metadata"]
        estimate = rows_module._FILE_OVERHEAD + rows_module._PICKLE_TO_JSON * len(rows_module.to_json(metadata))
        assert record.bytes <= estimate

    def test_an_unwritable_directory_is_told_at_the_start(self, open_session, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(CaptureError, match=r"can not write to .*/file/mxfp8/.*: Not a directory"):
            open_session(directory=tmp_path / "file")
        assert (tmp_path / "file").read_text() == "mine"
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_read_only_directory_is_told_at_the_start(self, open_session, tmp_path, monkeypatch):
        def denied(path, *args, **kwargs):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(Path, "mkdir", denied)  # the rights of a folder do not hold root back
        with pytest.raises(CaptureError, match=r"can not write to .*: Permission denied"):
            open_session()

    def test_a_directory_that_vanishes(self, open_session, caplog):
        session = open_session(control_iter=0)
        run_iteration(session, 0)
        session._sink._writer.close()  # everything of the first iteration is on disk
        shutil.rmtree(session.config.directory)
        session._sink._writer = BackgroundWriter(10**9, session._sink.fail)
        (session.config.directory).write_text("in the way")
        run_iteration(session, 1)
        session.close()
        assert "can not write" in session.failed
        assert len(errors_in(caplog)) == 1


class TestWriters:
    def test_whatever_a_writer_raises_is_surfaced(self, open_session, monkeypatch, caplog):
        def bad(tensor):
            raise ZeroDivisionError("by zero")

        monkeypatch.setattr(rows_module, "checksum", bad)
        session = open_session()
        run_iteration(session, 0)
        session.close()
        assert session.failed == "ZeroDivisionError: by zero"
        assert len(errors_in(caplog)) == 1

    def test_a_tensor_that_can_not_be_copied(self, open_session, caplog):
        session = open_session(control_iter=2)
        run_iteration(session, 0)
        while session.summary().rows < ROWS_A_PASS:  # what still waits at a failure is not written any more
            time.sleep(0.01)
        run_iteration(session, 1, tensors=linear_tensors() | {"output": torch.eye(3).to_sparse()})
        session.close()
        assert session.failed == "a torch.sparse_coo tensor can not be kept: only dense tensors can"
        assert len(errors_in(caplog)) == 1
        assert sorted(open_capture(session.config.directory).commits["mxfp8"]) == [0]

    def test_after_a_failure_nothing_waits(self, open_session, monkeypatch):
        """Reserved bytes come back, though the queue is full of tensors that nobody writes any more."""
        fail_after(monkeypatch, 0, OSError(errno.ENOSPC, "full"))
        session = open_session(control_iter=0, host_memory_bytes=1000)
        run = threading.Thread(target=lambda: [run_iteration(session, iteration) for iteration in range(20)])
        run.start()
        run.join(PATIENCE_S)
        assert not run.is_alive()
        session.close()
        assert session._sink._writer._reserved == 0

    def test_a_row_that_waits_for_an_earlier_one_does_not_wait_for_ever(self, open_session, monkeypatch):
        """The weight's second row has to know what became of the first, which fails while the second waits."""
        waiting = threading.Event()

        def fail_late(path, content):
            waiting.wait(1)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(folder, "save_tensor_file", fail_late)
        session = open_session()
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        tap = session.site(**LINEAR).tap()
        for operation in ("forward", "backward"):
            tap(operation, "pre", "weight", torch.ones(3))
        session.end_iteration({})
        closing = threading.Thread(target=session.close)
        closing.start()
        time.sleep(0.1)
        waiting.set()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()

    def test_memory_is_bounded_while_ten_times_as_much_is_captured(self, open_session, monkeypatch):
        save = folder.save_tensor_file

        def slow(path, content):
            time.sleep(0.002)
            save(path, content)

        monkeypatch.setattr(folder, "save_tensor_file", slow)
        tensors = linear_tensors(tokens=64, inputs=64, outputs=64)
        one = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        bound = 2 * one
        session = open_session(control_iter=0, host_memory_bytes=bound)
        for iteration in range(20):
            run_iteration(session, iteration, tensors=tensors)
        session.close()
        summary = session.summary()
        assert summary.bytes >= 10 * bound * 0.9
        assert session._sink._writer.peak_bytes <= bound
        assert summary.waited_seconds > 0
        assert open_capture(session.config.directory).problems == []

    def test_what_is_written_is_the_same_with_and_without_waiting(self, open_session):
        contents = []
        for run, bound in enumerate((1, 10**9)):
            session = open_session(quant_type=f"type{run}", control_iter=2, host_memory_bytes=bound)
            for iteration in range(2):
                run_iteration(session, iteration)
            session.close()
            capture = open_capture(session.config.directory / f"type{run}")
            contents.append([(r.counter, r.tensor_name, r.reference, r.checksum, r.bytes) for r in capture.records])
        assert contents[0] == contents[1]


KILLED_RUN = """
    import sys
    import torch
    from pathlib import Path
    from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates
    from tests.quantscope.capture.conftest import LINEAR, linear_tensors, run_iteration

    directory, run_id = Path(sys.argv[1]), sys.argv[2]
    config = CaptureConfig(enabled=True, directory=directory, control_iter=0, host_memory_bytes=10**6)
    session = CaptureSession(
        config, quant_type="mxfp8", rank=0, parallel=ParallelCoordinates(), run_id=run_id, run_info={}
    )
    site = session.site(**LINEAR)
    for iteration in range(10**6):
        tensors = linear_tensors(iteration, tokens=64, inputs=64, outputs=64)
        run_iteration(session, iteration, site=site, tensors=tensors)
        print(session.summary().rows, flush=True)
"""


def start_run(directory, run_id):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED_RUN), str(directory), run_id],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


class TestKill:
    @pytest.mark.parametrize("rows", [10, 75])
    def test_sigkill_leaves_a_readable_capture(self, tmp_path, rows, open_session):
        process = start_run(tmp_path / "capture", "20250101_000000_aaaaaa")
        while int(process.stdout.readline()) < rows:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)

        capture = open_capture(tmp_path / "capture")
        assert len(capture.records) >= rows
        assert all("not completed" in text or "unfinished" in text for text in capture.problems)
        for record in capture.records:
            expected = linear_tensors(record.iteration, tokens=64, inputs=64, outputs=64)[record.tensor_name]
            assert torch.equal(capture.load(record), expected)
        committed = [record for record in capture.records if record.committed and record.checksum]
        assert len(committed) == ROWS_A_PASS * len(capture.commits["mxfp8"])

        session = open_session()  # a new run in the same folder reads as itself
        run_iteration(session, 0)
        session.close()
        after = open_capture(session.config.directory)
        assert {record.run_id for record in after.records} == {session.identity["run_id"]}
        assert len(after.records) == ROWS_A_PASS

    def test_a_process_that_ends_without_close_loses_nothing(self, tmp_path):
        code = textwrap.dedent(KILLED_RUN).replace("range(10**6)", "range(3)")
        subprocess.run([sys.executable, "-c", code, str(tmp_path), "run"], cwd=ROOT, check=True, capture_output=True)
        capture = open_capture(tmp_path)
        assert capture.problems == []
        assert sorted(capture.commits["mxfp8"]) == [0, 1, 2]
        assert len(capture.records) == 3 * ROWS_A_PASS


def test_a_backward_after_the_end_of_its_iteration_is_told(open_session, caplog):
    session = open_session()
    site = session.site(**LINEAR)
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    tap = site.tap()
    show_forward(tap, linear_tensors())
    session.end_iteration({})
    show_backward(tap, linear_tensors())
    session.close()
    assert session.failed == "a tensor of iteration 0 was shown after the iteration's end"
    assert len(errors_in(caplog)) == 1
