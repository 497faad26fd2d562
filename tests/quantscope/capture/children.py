"""Processes that capture and are ended by signals: one server imports PyTorch once and forks a child for each.

`python -m tests.quantscope.capture.children` serves: it reads `[SCENARIO, DIRECTORY, OPTIONS]` as JSON lines, lets a
forked child play the scenario, and says by which exit code or signal that ended. What a child does, it says in JSON
lines too: {"pid"}, {"ended": iteration} after each iteration, {"committed": iterations that it knows to be on disk}.
"""

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120  # the first statistics of a machine wait for a compiler
RUN_ID = "20250101_000000_aaaaaa"
SIZES = {"tokens": 32, "inputs": 64, "outputs": 64}
SCENARIOS = {}


class Children:
    """The test's end of the server."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.quantscope.capture.children"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines = queue.Queue()
        self._pid = None
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, scenario, directory, **options):
        """Begin a scenario; returns when its child runs."""
        self._server.stdin.write(json.dumps([scenario, str(directory), options]) + "\n")
        self._pid = self._next()["pid"]

    def await_line(self, key):
        """What the child says first under `key`."""
        while key not in (said := self._next()):
            assert "status" not in said, said
        return said[key]

    def send(self, number):
        os.kill(self._pid, number)

    def end(self):
        """Wait for the child's end: its exit code, or minus the signal's number; and all it said."""
        said, end = [], time.monotonic() + PATIENCE_S
        while "status" not in (line := self._next()):
            said.append(line)
            if time.monotonic() > end:  # it still talks, and does not end
                os.kill(self._pid, signal.SIGKILL)
        return line["status"], said

    def close(self):
        self._server.stdin.close()
        self._server.wait(PATIENCE_S)

    def _read(self):
        for line in self._server.stdout:
            self._lines.put(json.loads(line))

    def _next(self):
        try:
            return self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            os.kill(self._pid, signal.SIGKILL)  # the next scenario is to find a server that listens
            self.end()
            raise AssertionError("the child hangs") from None


def say(**what):
    os.write(sys.stdout.fileno(), (json.dumps(what) + "\n").encode())  # whole, or not at all


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def tensors_of(iteration):
    from tests.quantscope.capture.conftest import linear_tensors

    return linear_tensors(iteration, **SIZES)


def open_session(directory, options):
    from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates

    config = CaptureConfig(**{"directory": Path(directory), "control_iter": 0, "host_memory_bytes": 10**6} | options)
    identity = {"quant_type": "mxfp8", "rank": 0, "parallel": ParallelCoordinates(), "run_id": RUN_ID}
    return CaptureSession(config, **identity, run_info={})


def train(session, iterations):
    from tests.quantscope.capture.conftest import LINEAR, run_iteration

    site = session.site(**LINEAR)
    for iteration in range(iterations):
        run_iteration(session, iteration, site=site, tensors=tensors_of(iteration))
        if not session._sink._closed:  # else it was not taken: a signal ends the run
            say(ended=iteration)
        assert session.failed is None, session.failed
        say(committed=session.summary().iterations)


def slow_down(seconds):
    """Make every tensor file take a while."""
    from megatron.quantscope.capture import folder

    save = folder.save_tensor_file

    def slow(file, content):
        time.sleep(seconds)
        save(file, content)

    folder.save_tensor_file = slow


@scenario
def endless(directory, options):
    train(open_session(directory, options), 10**9)


@scenario
def without_close(directory, options):
    train(open_session(directory, options), 3)


@scenario
def waiting_for_room(directory, options):
    slow_down(0.05)
    train(open_session(directory, {"host_memory_bytes": 20_000} | options), 10**9)


@scenario
def during_the_last_close(directory, options):
    slow_down(0.05)
    session = open_session(directory, options)
    train(session, 3)
    say(closing=True)
    session.close()
    time.sleep(PATIENCE_S)  # other work of the program's end


@scenario
def throttled(directory, options):
    """Show tensors as fast as they are taken, `shown_bytes` in all, to a disk of `bytes_a_second`."""
    import torch

    from megatron.quantscope.capture import folder, rows, segment_writer
    from tests.quantscope.capture.conftest import LINEAR

    bytes_a_second, shown_bytes = options.pop("bytes_a_second"), options.pop("shown_bytes")
    save, write = folder.save_tensor_file, os.pwrite

    def save_slowly(file, content):
        save(file, content)
        time.sleep(content["tensor"].nbytes / bytes_a_second)

    def write_slowly(file, content, offset):
        time.sleep(len(content) / bytes_a_second)
        return write(file, content, offset)

    rows.measured = lambda tensor, blocks: (None, None)  # where no compiler is, that takes longer than the disk
    folder.save_tensor_file, segment_writer.os.pwrite = save_slowly, write_slowly
    session = open_session(directory, options)
    site = session.site(**LINEAR)
    tensor, memory, shown = torch.zeros(_THROTTLED_BYTES // 4), 0, 0
    for iteration in range(1 + shown_bytes // _THROTTLED_BYTES // 4):
        if iteration == 1:  # the first one is to warm up
            memory = _peak_memory(reset=True)
        session.begin_iteration(iteration)
        session.begin_micro_batch(0, [0])
        for number, name in enumerate(("input", "output", "grad_output", "grad_input")):
            tensor.fill_(4.0 * iteration + number)  # the same memory: what the training takes is not the subject
            site.tap()("forward", "pre", name, tensor)
            shown += tensor.nbytes
        session.end_iteration({})
    session.close()
    say(grown=_peak_memory() - memory, shown=shown, waited=session.summary().waited_seconds, failed=session.failed)


_THROTTLED_BYTES = 4 << 20


def _peak_memory(*, reset=False):
    """Bytes of this process that were resident at a time, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


@scenario
def stuck_in_c(directory, options):
    session = open_session(directory, options)
    train(session, 3)
    mutex = ctypes.create_string_buffer(128)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    say(stuck=True)
    library.pthread_mutex_lock(mutex)


@scenario
def own_handler_before(directory, options):
    signal.signal(signal.SIGTERM, _leave)
    endless(directory, options)


@scenario
def own_handler_after(directory, options):
    session = open_session(directory, options)
    signal.signal(signal.SIGTERM, _leave)
    train(session, 10**9)


def _leave(number, frame):
    say(handled=number)
    sys.exit(7)


@scenario
def forks(directory, options):
    session = open_session(directory, options)
    train(session, 1)
    told = [_status_of(_terminated), _status_of(_leaving)]
    train_more(session)
    say(forked=told)
    session.close()


def train_more(session):
    from tests.quantscope.capture.conftest import run_iteration

    run_iteration(session, 1, tensors=tensors_of(1))


def _status_of(play):
    pid = os.fork()
    if not pid:
        play()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os._exit(99)


def _leaving():
    sys.exit(5)  # with everything that is registered for the interpreter's end


def serve():
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    _load_all()
    for line in sys.stdin:
        name, directory, options = json.loads(line)
        pid = os.fork()
        if not pid:
            say(pid=os.getpid())
            SCENARIOS[name](directory, options)
            sys.exit(0)
        say(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _load_all():
    """Have done what only the first capture of a process does: imports, and loading the kernels."""
    from tests.quantscope.capture.conftest import LINEAR, run_iteration

    for save_format in ("pt", "segment"):
        with tempfile.TemporaryDirectory() as directory:
            session = open_session(directory, {"save_format": save_format, "mode": "both"})
            run_iteration(session, 0, site=session.site(**LINEAR), tensors=tensors_of(0))
            session.close()


if __name__ == "__main__":
    serve()
