"""What goes wrong: the disk, the budget, a writer, a tensor. Training goes on or stops as asked, with one message, and
what was collected stays readable."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron.quantscope.capture import CaptureError, folder, open_capture
from megatron.quantscope.capture import rows as rows_module
from megatron.quantscope.capture import segment_writer as segment_writer_module
from megatron.quantscope.capture.writer import BackgroundWriter
from tests.quantscope.capture.conftest import (
    FORMATS_OF_FILES,
    LINEAR,
    ROWS_A_PASS,
    check_readable,
    linear_tensors,
    manifest_of,
    run_iteration,
    stored_tensor,
    unfinished_files,
)
from tests.quantscope.capture.faults import KINDS, PATIENCE_S, Disk, await_commits, errors_in, written

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=FORMATS_OF_FILES)
def save_format(request):
    return request.param


PT_POINTS = ("file", "tensor_name")
SEGMENT_POINTS = ("segment_made", "segment_room", "segment_tensor", "segment_header", "segment_name")
POINTS_OF = {
    "pt": (*PT_POINTS, "manifest"),
    "pt with blocks": ("file", "segment_tensor", "segment_name", "manifest"),
    "segment": (*SEGMENT_POINTS, "manifest"),
    "segment with blocks": ("segment_tensor", "segment_name", "manifest"),
    "statistics": ("segment_made", "segment_tensor", "segment_name", "manifest"),
}


class TestDisk:
    @pytest.mark.parametrize(
        ("kind", "point"), [(kind, point) for kind, points in POINTS_OF.items() for point in points]
    )
    def test_a_full_disk_ends_collecting_and_training_goes_on(self, open_session, monkeypatch, caplog, kind, point):
        session = open_session(control_iter=4, **KINDS[kind])
        run_iteration(session, 0)
        await_commits(session, 1)
        getattr(Disk(monkeypatch, session, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), point)()
        for iteration in range(1, 4):
            run_iteration(session, iteration)
        assert session.finished  # at the same iteration as with an empty disk
        session.close()
        assert "No space left on device" in session.failed
        assert len(errors_in(caplog)) == 1
        assert "training goes on" in errors_in(caplog)[0]

        capture = open_capture(session.config.directory)
        check_readable(capture)
        assert len([record for record in capture.records if record.committed and not record.bare]) == ROWS_A_PASS
        assert sorted(capture.commits["mxfp8"]) == [0]
        assert session.summary().iterations == 1
        assert not any("damaged" in problem or "missing" in problem for problem in capture.problems)
        assert any("collecting ended early" in problem for problem in capture.problems) == (point != "manifest")
        assert unfinished_files(session) == []
        for row in manifest_of(session, "tensor"):  # no line names what is not there
            if row["store"] != "none":
                assert torch.equal(stored_tensor(session, row), linear_tensors(row["iteration"])[row["tensor_name"]])
        if kind != "pt with blocks" and point != "manifest":  # else there are whole files that no line names
            assert session.summary().bytes == written(session)

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
    @pytest.mark.parametrize(("kind", "point"), [("pt", "file"), ("segment", "segment_tensor")])
    def test_the_system_s_reason_is_told(self, open_session, monkeypatch, caplog, kind, point, code):
        session = open_session(**KINDS[kind])
        getattr(Disk(monkeypatch, session, OSError(code, os.strerror(code))), point)()
        run_iteration(session, 0)
        session.close()
        assert session.failed.endswith(f": {os.strerror(code)}")
        assert len(errors_in(caplog)) == 1
        with pytest.raises(CaptureError, match="no captures in"):
            open_capture(session.config.directory)

    @pytest.mark.parametrize(("kind", "point"), [("pt", "file"), ("segment", "segment_tensor")])
    def test_stop_ends_training_after_the_iteration(self, open_session, monkeypatch, caplog, kind, point):
        session = open_session(control_iter=0, stop_on_error=True, **KINDS[kind])
        getattr(Disk(monkeypatch, session, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), point)()

        def train():
            for iteration in range(1000):
                run_iteration(session, iteration)
                time.sleep(0.001)

        with pytest.raises(CaptureError, match="No space left on device"):
            train()
        session.close()
        assert len(errors_in(caplog)) == 1
        assert "training stops after this iteration" in errors_in(caplog)[0]

    def test_a_disk_that_really_refuses(self, tmp_path):
        """The system's own limit on a file's size: it takes a part of a write, and nothing of the next."""
        code = """
            import json, resource, signal, sys, torch
            from pathlib import Path
            from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates
            from tests.quantscope.capture.conftest import linear_tensors, run_iteration

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            for save_format in ("pt", "segment"):
                directory = Path(sys.argv[1]) / save_format
                config = CaptureConfig(directory=directory, control_iter=0, save_format=save_format)
                session = CaptureSession(
                    config, quant_type="mxfp8", rank=0, parallel=ParallelCoordinates(), run_id="run", run_info={}
                )
                run_iteration(session, 0)
                while session.summary().iterations < 1:
                    pass
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
                large = dict.fromkeys(linear_tensors(), torch.ones(100_000))
                run_iteration(session, 1, tensors=large)
                session.close()
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                print(json.dumps(session.failed))
        """
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
        result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        assert [json.loads(line).rpartition(": ")[2] for line in result.stdout.splitlines()] == ["File too large"] * 2
        for save_format in FORMATS_OF_FILES:
            capture = open_capture(tmp_path / save_format)
            assert len(capture.records) == ROWS_A_PASS
            check_readable(capture)
            assert list((tmp_path / save_format).rglob(".*")) == []

    @pytest.mark.slow
    def test_a_file_larger_than_what_one_write_takes(self, open_session, save_format):
        session, size = (
            open_session(save_format=save_format, host_memory_bytes=1 << 20),
            (1 << 30) + 1000,
        )  # elements of two bytes
        tensor = torch.zeros(size, dtype=torch.bfloat16)
        tensor[-1] = 7
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        session.site(**LINEAR).tap()("forward", "pre", "input", tensor)
        del tensor
        session.end_iteration({})
        session.close()
        assert session.failed is None
        capture = open_capture(session.config.directory)
        loaded = capture.load(capture.records[0])
        assert (loaded.numel(), int(loaded[-1])) == (size, 7)

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

    def test_a_directory_that_vanishes(self, open_session, caplog, save_format):
        session = open_session(control_iter=0, save_format=save_format)
        run_iteration(session, 0)
        await_commits(session, 1)
        shutil.rmtree(session.config.directory)
        session.config.directory.write_text("in the way")
        run_iteration(session, 1)
        session.close()
        assert "can not write" in session.failed
        assert len(errors_in(caplog)) == 1


class TestWriters:
    def test_whatever_a_writer_raises_is_surfaced(self, open_session, monkeypatch, caplog, save_format):
        def bad(tensor):
            raise ZeroDivisionError("by zero")

        session = open_session(control_iter=2, save_format=save_format)
        run_iteration(session, 0)
        await_commits(session, 1)
        monkeypatch.setattr(rows_module, "checksum", bad)
        run_iteration(session, 1)
        session.close()
        assert session.failed == "ZeroDivisionError: by zero"
        assert len(errors_in(caplog)) == 1
        capture = open_capture(session.config.directory)
        assert len(capture.records) == ROWS_A_PASS
        check_readable(capture)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_tensor_that_can_not_be_kept(self, open_session, caplog, kind):
        session = open_session(control_iter=2, **KINDS[kind])
        run_iteration(session, 0)
        await_commits(session, 1)  # what still waits at a failure is not written any more
        run_iteration(session, 1, tensors=linear_tensors() | {"output": torch.eye(3).to_sparse()})
        session.close()
        assert session.failed == "a torch.sparse_coo tensor can not be kept: only dense tensors can"
        assert len(errors_in(caplog)) == 1
        assert sorted(open_capture(session.config.directory).commits["mxfp8"]) == [0]

    @pytest.mark.parametrize(("kind", "point"), [("pt", "file"), ("segment", "segment_tensor")])
    def test_after_a_failure_nothing_waits(self, open_session, monkeypatch, kind, point):
        """Memory comes back, though the queue is full of tensors that nobody writes any more."""
        session = open_session(control_iter=0, host_memory_bytes=1000, **KINDS[kind])
        getattr(Disk(monkeypatch, session, OSError(errno.ENOSPC, "full")), point)()
        run = threading.Thread(target=lambda: [run_iteration(session, iteration) for iteration in range(20)])
        run.start()
        run.join(PATIENCE_S)
        assert not run.is_alive()
        session.close()
        assert session._sink._arena._out == 0

    @pytest.mark.parametrize("repetition", range(10))
    def test_a_row_that_waits_for_an_earlier_one_does_not_wait_for_ever(self, open_session, monkeypatch, repetition):
        """The weight's second row has to know what became of the first, which fails while the second waits; and the
        message has to be of the first."""
        waiting = threading.Event()

        def fail_late(file, content):
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
        time.sleep(0.01)
        waiting.set()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert session.failed.endswith("full")

    def test_a_commit_never_follows_a_segment_that_failed(self, open_session, monkeypatch):
        session = open_session(control_iter=0, save_format="segment")
        finish = segment_writer_module.SegmentWriter.finish

        def fail_once(writer, **options):
            monkeypatch.setattr(segment_writer_module.SegmentWriter, "finish", finish)
            time.sleep(0.05)  # rows of the next iterations, which would refer to the weight in it, wait meanwhile
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(segment_writer_module.SegmentWriter, "finish", fail_once)
        weight = {"weight": linear_tensors(0)["weight"]}
        for iteration in range(3):
            run_iteration(session, iteration, tensors=linear_tensors(iteration) | weight)
        session.close()
        assert manifest_of(session, "commit") == []
        with pytest.raises(CaptureError, match=r"kept nothing.*collecting ended early"):
            open_capture(session.config.directory)
        assert unfinished_files(session) == []

    def test_closing_from_two_threads_waits_in_both(self, open_session, monkeypatch):
        save, gate, done = folder.save_tensor_file, threading.Event(), []

        def slow(file, content):
            gate.wait(PATIENCE_S)
            save(file, content)

        monkeypatch.setattr(folder, "save_tensor_file", slow)
        session = open_session()
        run_iteration(session, 0)
        closing = [threading.Thread(target=lambda: (session.close(), done.append(1))) for _ in range(2)]
        for thread in closing:
            thread.start()
        time.sleep(0.05)
        assert done == []
        gate.set()
        for thread in closing:
            thread.join(PATIENCE_S)
        assert done == [1, 1]
        assert len(open_capture(session.config.directory).records) == ROWS_A_PASS

    def test_what_is_written_is_the_same_with_and_without_waiting(self, open_session, save_format):
        contents = []
        for run, bound in enumerate((1, 10**9)):
            session = open_session(
                quant_type=f"type{run}", control_iter=2, host_memory_bytes=bound, save_format=save_format
            )
            for iteration in range(2):
                run_iteration(session, iteration)
            session.close()
            capture = open_capture(session.config.directory / f"type{run}")
            contents.append([(r.counter, r.tensor_name, r.checksum, r.bytes) for r in capture.records])
            assert sum(r.reference for r in capture.records) == 2  # in a segment, of whichever row comes second
        assert contents[0] == contents[1]


def test_writers_end_with_their_session(open_session):
    before = threading.active_count()
    session = open_session()
    assert threading.active_count() > before
    run_iteration(session, 0)
    session.close()
    end = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:  # the watch for SIGTERM takes a moment to hear of it
        assert time.monotonic() < end
        time.sleep(0.002)
    assert not any(isinstance(getattr(thread, "_target", None), BackgroundWriter) for thread in threading.enumerate())
