"""`--exit-signal-handler`: a run that is asked to end saves what it has, and goes on from there later."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.quantscope.capture import open_capture
from tests.end_to_end.conftest import MODEL_FLAGS, ROOT, TIMEOUT_S

LATEST = "latest_checkpointed_iteration.txt"
MANY = ("--train-iters", 2000)
HANDLER = "--exit-signal-handler"
FIRST = "iteration        1/"


def ended_after(output, name):
    """The iteration after which the run says that it ends by this signal."""
    (line,) = [line for line in output.splitlines() if line.startswith("training ends after iteration")]
    assert line.endswith(f": {name} (--exit-signal-handler)")
    return int(line.split()[4].rstrip(":"))


def test_all_ranks_save_flush_and_end_and_the_run_goes_on(trainer, tmp_path):
    saved, captured = tmp_path / "saved", tmp_path / "captured"
    capture = ("--save-tensors", "--control-iter", 0, "--tensor-filter", "layers=0", "--tensor-save-dir", captured)
    capture += ("--tensor-save-format", "segment")
    flags = (*MODEL_FLAGS, *MANY, HANDLER, "--save", saved)
    codes, output = trainer.launch(*flags, *capture, ranks=2, after=FIRST, send=signal.SIGTERM)
    assert codes == [0, 0], output[-4000:]
    last = ended_after(output, "SIGTERM")
    assert (saved / LATEST).read_text() == str(last)
    assert output.count("saved checkpoint") == 1
    records = open_capture(captured).records
    assert {record.iteration for record in records if record.committed} == set(range(last))
    assert all(record.committed for record in records)
    goes_on = trainer.run(*flags, "--load", saved, "--exit-interval", last + 1, ranks=2)
    assert f"iteration {last + 1:8d}/" in goes_on


def test_the_signal_is_the_one_that_was_named(trainer, tmp_path):
    flags = (*MODEL_FLAGS, *MANY, HANDLER, "--exit-signal", "SIGUSR1", "--save", tmp_path, "--async-save")
    codes, output = trainer.launch(*flags, after=FIRST, send=signal.SIGUSR1)
    assert codes == [0], output[-4000:]
    assert (tmp_path / LATEST).read_text() == str(ended_after(output, "SIGUSR1"))


def test_without_the_flag_the_signal_ends_the_run_as_ever(trainer, tmp_path):
    codes, output = trainer.launch(*MODEL_FLAGS, *MANY, "--save", tmp_path, after=FIRST, send=signal.SIGTERM)
    assert codes == [-signal.SIGTERM]
    assert "training ends" not in output
    assert not (tmp_path / LATEST).exists()


def signal_ranks(launcher):
    """As `pkill -TERM -P LAUNCHER` does."""
    for rank in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        os.kill(int(rank), signal.SIGTERM)


# What is signalled -> how, given the launcher's process.
SEND = {
    "launcher": lambda pid: os.kill(pid, signal.SIGTERM),
    "every process": lambda pid: (signal_ranks(pid), os.kill(pid, signal.SIGTERM)),
    "ranks": signal_ranks,
}


def start(*flags, ranks=2):
    """The run under torchrun in a session of its own, once its first iteration is done; its output goes on."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    run = subprocess.Popen(
        [*launcher, str(ROOT / "pretrain_gpt.py"), *MODEL_FLAGS, *map(str, (*MANY, *flags))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = []
    for line in run.stdout:
        said.append(line)
        if FIRST in line:
            return run, said
    raise AssertionError("".join(said))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "code"),
    [("launcher", 1), ("every process", 1), ("ranks", 0)],  # torchrun itself ends with 1 when it gets a signal
)
def test_under_a_launcher(tmp_path, signalled, code):
    """A scheduler signals the launcher, or all processes of the job, or someone the ranks alone.

    They get it once, or twice at once. All save, and the exit code is the launcher's.
    """
    run, said = start(HANDLER, "--save", tmp_path, "--num-workers", 1)
    try:
        SEND[signalled](run.pid)
        output = "".join(said) + run.communicate(timeout=TIMEOUT_S)[0]
    finally:
        run.kill()
    assert (tmp_path / LATEST).read_text() == str(ended_after(output, "SIGTERM"))
    assert run.returncode == code
    assert ("SignalException" in output) == (code == 1)


@pytest.mark.slow
def test_asked_again_it_ends_at_once(trainer, tmp_path):
    """Both signals while one iteration lasts: it is long here."""
    long = ("--global-batch-size", 4000)
    launcher = [sys.executable, str(ROOT / "pretrain_gpt.py"), *MODEL_FLAGS, *map(str, (*long, HANDLER))]
    run = subprocess.Popen(
        [*launcher, "--save", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert any("ready after" in line for line in run.stdout)
        run.send_signal(signal.SIGTERM)
        time.sleep(6)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=30) == -signal.SIGTERM
    finally:
        run.kill()
        run.communicate()
    assert not (tmp_path / LATEST).exists()
