"""Runs of the trainer by forks of one process that has imported it: importing takes most of a small run's time.

`ForkedTrainer` starts this file as a program and hands it one job a line; the program forks the ranks of a job, with
the environment that torchrun would give them, and answers with their exit codes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.01


class ForkedTrainer:
    """Trains with the command lines it is given, one after the other; a context manager.

    Args:
        server: The module that does the jobs.
    """

    def __init__(self, server="tests.end_to_end.forked_ranks"):
        self._module = server

    def __enter__(self):
        command = [sys.executable, "-m", self._module]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        return self

    def __exit__(self, *_):
        self._server.communicate()

    def run(self, *flags, ranks=1):
        """Train; returns what all ranks printed. Fails with it when a rank fails."""
        codes, printed = self.launch(*flags, ranks=ranks)
        assert codes == [0] * ranks, f"exit codes {codes}\n{printed[-4000:]}"
        return printed

    def launch(self, *flags, ranks=1, after=None, send=None):
        """Train, however it ends; returns the ranks' exit codes and what all of them printed.

        With `after`, all ranks get the signal `send` as soon as that text is printed.
        """
        with tempfile.NamedTemporaryFile("r") as output:
            job = {"argv": list(map(str, flags)), "ranks": ranks, "output": output.name, "after": after, "send": send}
            print(json.dumps(job), file=self._server.stdin, flush=True)
            codes = json.loads(self._server.stdout.readline())
            return codes, output.read()


def serve():
    """Do the jobs that standard input names, until it ends."""
    from megatron.training.main import _import_core, main

    _import_core()
    import megatron.training.training  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        port = _free_port()
        ranks = [_fork(main, job, rank, port) for rank in range(job["ranks"])]
        if job["after"] is not None:
            _signal(ranks, job)
        print(json.dumps(_exit_codes(ranks)), flush=True)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _fork(main, job, rank, port):
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        if job["ranks"] > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
            place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
        output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        code = main(job["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # never back into the loop of the process that forked


def _signal(ranks, job):
    """Send the signal once the text is there; a rank that ends before is waited for as any other."""
    while job["after"] not in Path(job["output"]).read_text():
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(POLL_S)
    for rank in ranks:
        os.kill(rank, job["send"])


def _exit_codes(ranks):
    """Wait for all; when one fails, end the others, which would wait for it."""
    codes = {}
    while len(codes) < len(ranks):
        process, status = os.wait()
        codes[process] = os.waitstatus_to_exitcode(status)
        if codes[process]:
            for other in set(ranks) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[rank] for rank in ranks]


if __name__ == "__main__":
    serve()
