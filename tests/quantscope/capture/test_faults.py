"""What goes wrong: the disk, the budget, a writer, a tensor. Training goes on or stops as asked, with one message, and
what was collected stays readable."""

import errno
import json
import logging
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

from megatron.quantscope.capture import CaptureError, ParallelCoordinates, folder, open_capture, pt_store
from megatron.quantscope.capture import rows as rows_module
from megatron.quantscope.capture import segment_writer as segment_writer_module
from megatron.quantscope.capture.files import TEMPORARY_PREFIX
from megatron.quantscope.capture.writer import BackgroundWriter
from tests.quantscope.capture.conftest import (
    FORMATS_OF_FILES,
    LINEAR,
    ROWS_A_PASS,
    check_readable,
    linear_tensors,
    manifest_of,
    run_iteration,
    show_backward,
    show_forward,
    stored_tensor,
    unfinished_files,
)

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 20

KINDS = {
    "pt": {"save_format": "pt"},
    "pt with blocks": {"save_format": "pt", "mode": "both"},
    "segment": {"save_format": "segment"},
    "segment with blocks": {"save_format": "segment", "mode": "both"},
    "statistics": {"mode": "statistics"},
}


@pytest.fixture(params=FORMATS_OF_FILES)
def save_format(request):
    return request.param


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def written(session):
    """Bytes of the tensor files and segments that are there."""
    found = session.config.directory.rglob("*")
    return sum(path.stat().st_size for path in found if path.suffix in (".pt", ".safetensors"))


def await_commits(session, iterations):
    end = time.monotonic() + PATIENCE_S
    while session.summary().iterations < iterations:
        assert time.monotonic() < end
        time.sleep(0.002)


class Disk:
    """Breaks at one point of writing, from now on; a write that breaks takes a half of what it is given."""

    def __init__(self, monkeypatch, session, error):
        self.patch = monkeypatch.setattr
        self.session = session
        self.error = error

    def fail(self, *args, **options):
        raise self.error

    def file(self):
        def half(file, content):
            file.write(b"half a file")
            raise self.error

        self.patch(folder, "save_tensor_file", half)

    def tensor_name(self):
        self.patch("megatron.quantscope.capture.files.give_name", self.fail)

    def segment_made(self):
        make = os.open

        def refuse(path, flags, *mode, **options):
            if TEMPORARY_PREFIX in str(path) and flags & os.O_CREAT:
                raise self.error
            return make(path, flags, *mode, **options)

        self.patch(segment_writer_module.os, "open", refuse)

    def pwrite(self, broken):
        write = os.pwrite

        def limited(file, content, offset):
            if not broken(content, offset):
                return write(file, content, offset)
            write(file, content[: len(content) // 2], offset)
            raise self.error

        self.patch(segment_writer_module.os, "pwrite", limited)

    def segment_room(self):
        self.pwrite(lambda content, offset: offset == 0 and not bytes(content).strip())

    def segment_tensor(self):
        self.pwrite(lambda content, offset: offset > 0)

    def segment_header(self):
        self.pwrite(lambda content, offset: offset == 0 and bytes(content).strip())

    def segment_name(self):
        self.patch(segment_writer_module, "give_name", self.fail)

    def manifest(self):
        file, error = self.session._sink._manifest._file, self.error

        class Half:
            def __getattr__(self, name):
                return getattr(file, name)

            def write(self, line):
                file.write(line[: len(line) // 2])
                raise error

        self.session._sink._manifest._file = Half()


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
        session, size = open_session(save_format=save_format, host_memory_bytes=1 << 20), (1 << 31) + 1000
        tensor = torch.zeros(size, dtype=torch.uint8)
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


class TestBudget:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_ends_collecting(self, open_session, caplog, kind):
        budget = 200_000
        session = open_session(control_iter=0, budget_bytes=budget, **KINDS[kind])
        for iteration in range(100):
            run_iteration(session, iteration)
            if iteration == 1:
                await_commits(session, 2)  # the rest may wait in the queue when it is spent
        session.close()
        assert session.failed == "the budget of 0.0002 GB a rank is spent; raise --tensor-budget-gb"
        assert len(errors_in(caplog)) == 1
        assert budget / 10 < written(session) <= budget
        assert kind == "pt with blocks" or session.summary().bytes == written(session)
        capture = open_capture(session.config.directory)
        assert len(capture.records) >= 2 * ROWS_A_PASS
        check_readable(capture)
        assert unfinished_files(session) == []

    def test_nearly_all_of_it_is_used(self, open_session):
        session = open_session(control_iter=0, budget_bytes=200_000)
        for iteration in range(100):
            run_iteration(session, iteration)
            time.sleep(0.002)
        session.close()
        assert 170_000 < written(session) <= 200_000

    def test_a_tensor_larger_than_what_is_left_is_not_begun(self, open_session, save_format):
        session = open_session(budget_bytes=60_000, save_format=save_format)
        run_iteration(session, 0, tensors=dict.fromkeys(linear_tensors(), torch.zeros(100_000)))
        session.close()
        assert "budget" in session.failed
        assert written(session) == 0
        assert unfinished_files(session) == []

    def test_a_large_tensor_in_a_segment_leaves_no_hole(self, open_session):
        session = open_session(budget_bytes=60_000, save_format="segment")
        tensors = linear_tensors() | {"grad_output": torch.zeros(100_000)}
        run_iteration(session, 0, tensors=tensors)
        session.close()
        assert "budget" in session.failed
        assert 0 < written(session) <= 60_000

    def test_it_is_shared_by_the_ranks(self, open_session, save_format):
        parallel = ParallelCoordinates(dp_size=4)
        session = open_session(parallel=parallel, control_iter=0, budget_bytes=240_000, save_format=save_format)
        for iteration in range(50):
            run_iteration(session, iteration)
        session.close()
        assert 0 < written(session) <= 60_000

    def test_an_estimate_never_falls_short_of_the_file(self, open_session):
        """The budget trusts it: long metadata, an empty tensor."""
        session = open_session()
        formats = {f"gemm{number}": {"operand": "x" * 40} for number in range(200)}
        site = session.site(**(LINEAR | {"formats": formats}))
        session.begin_iteration(0)
        session.begin_micro_batch(0, range(5000), document_ids=[[number] for number in range(5000)])
        site.tap()("forward", "pre", "input", torch.zeros(0))
        session.end_iteration({})
        session.close()
        record = open_capture(session.config.directory).records[0]
        metadata = torch.load(record.path, weights_only=True)["metadata"]
        estimate = pt_store._FILE_OVERHEAD + pt_store._PICKLE_TO_JSON * len(json.dumps(metadata))
        assert record.bytes <= estimate


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
            time.sleep(0.05)  # while rows of the next iterations, which refer to the weight in it, are written
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(segment_writer_module.SegmentWriter, "finish", fail_once)
        weight = {"weight": linear_tensors(0)["weight"]}
        for iteration in range(3):
            run_iteration(session, iteration, tensors=linear_tensors(iteration) | weight)
        session.close()
        assert manifest_of(session, "commit") == []
        capture = open_capture(session.config.directory)
        assert not any("missing" in problem for problem in capture.problems)
        assert {record.tensor_name for record in capture.records}.isdisjoint({"weight"})
        assert 0 not in {record.iteration for record in capture.records}
        check_readable(capture)
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


class TestRowsThatMayNotBe:
    def test_a_backward_after_the_end_of_its_iteration_is_told(self, open_session, caplog, save_format):
        session = open_session(save_format=save_format)
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        tap = site.tap()
        show_forward(tap, linear_tensors(0))
        session.end_iteration({})
        await_commits(session, 1)
        show_backward(tap, linear_tensors(0))
        session.close()
        assert session.failed == "a tensor of iteration 0 was shown after the iteration's end"
        assert len(errors_in(caplog)) == 1
        capture = open_capture(session.config.directory)
        assert len(capture.records) == 3
        check_readable(capture)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_collision_is_an_error_that_names_the_module(self, open_session, caplog, kind):
        session = open_session(**KINDS[kind])
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        for _ in range(2):
            show_forward(site.tap(), linear_tensors(0))
        session.end_iteration({})
        session.close()
        assert session.failed.startswith(
            f"forward input of {LINEAR['module']} was shown twice in micro-batch 0 of iteration 0"
        )
        assert len(errors_in(caplog)) == 1
        assert "training goes on" in errors_in(caplog)[0]

    def test_a_collision_stops_where_errors_do(self, open_session):
        session = open_session(stop_on_error=True)
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        for _ in range(2):
            show_forward(site.tap(), linear_tensors(0))
        with pytest.raises(CaptureError, match=f"of {LINEAR['module']} was shown twice"):
            session.end_iteration({})

    def test_other_micro_batches_iterations_and_modules_do_not_collide(self, open_session):
        session = open_session(control_iter=2, collect_micro_batches=2)
        sites = [session.site(**(LINEAR | {"module": name})) for name in ("linear_fc1", "linear_fc2")]
        for iteration in range(2):
            session.begin_iteration(iteration)
            for micro_batch in range(2):
                session.begin_micro_batch(micro_batch, [0])
                for site in sites:
                    show_forward(site.tap(), linear_tensors(iteration))
            session.end_iteration({})
        session.close()
        assert session.failed is None
        assert session.summary().rows == 2 * 2 * 2 * 3


class TestTwoRuns:
    def test_at_the_same_time_in_one_directory(self, open_session, save_format):
        sessions = [open_session(run_id=name, control_iter=0, save_format=save_format) for name in ("run_a", "run_b")]
        for iteration in range(3):
            for number, session in enumerate(sessions):
                run_iteration(session, iteration, tensors=linear_tensors(10 * number + iteration))
        for session in sessions:
            session.close()
        for number, session in enumerate(sessions):
            capture = open_capture(session.config.directory, run=session.identity["run_id"])
            assert len(capture.records) == 3 * ROWS_A_PASS
            assert capture.problems == []
            check_readable(capture, lambda iteration, number=number: linear_tensors(10 * number + iteration))

    def test_that_would_take_each_other_s_names(self, open_session, monkeypatch, caplog):
        """Two processes that write as one rank, in the same second: their counters do not know of each other."""
        monkeypatch.setattr("megatron.quantscope.capture.site.time.time", lambda: 1.7e9)
        first, second = (open_session(run_id=name) for name in ("run_a", "run_b"))
        second._sink._folder = folder.CaptureFolder(first._sink._folder.path, 0)
        second._sink._rows._files._folder = second._sink._folder
        assert (first._sink._folder.next_counter(), second._sink._folder.next_counter()) == (1, 1)
        run_iteration(first, 0)
        first.close()
        run_iteration(second, 0, tensors=linear_tensors(5))
        second.close()
        assert first.failed is None
        assert "exists and is not overwritten: does another run write as rank 0?" in second.failed
        assert len(errors_in(caplog)) == 1
        capture = open_capture(first.config.directory, run="run_a")
        assert len(capture.records) == ROWS_A_PASS
        check_readable(capture)


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
