import os
import signal
import sys
import time

import psutil
import pytest

from script.driver import process
from script.driver.process import Interrupted, RunningProgram, stop_signals_raise

SLEEP = "import time; time.sleep(600)"


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(code, log):
    lines = []
    with RunningProgram([sys.executable, "-c", code], log=log) as program:
        while (new := program.lines(0.05)) is not None:
            lines += new
        return program.returncode, lines


def test_output_of_both_streams_is_logged_and_handed_on(tmp_path):
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr, flush=True); sys.stdout.write('three')"
    log = tmp_path / "log"
    assert run(code, log) == (0, ["one", "two", "three"])
    assert log.read_text() == "one\ntwo\nthree"


def test_a_last_burst_of_output_is_not_lost(tmp_path):
    code = "print('\\n'.join(map(str, range(5000))))"
    assert run(code, tmp_path / "log") == (0, [str(number) for number in range(5000)])


def test_undecodable_output_does_no_harm(tmp_path):
    code = "import sys; sys.stdout.buffer.write(b'caf\\xe9\\n')"
    assert run(code, tmp_path / "log") == (0, ["caf\ufffd"])


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_exit_codes(tmp_path, code, exit_code):
    assert run(code, tmp_path / "log")[0] == exit_code


def start_family(tmp_path):
    """A program whose child sits in a session of its own and ignores SIGTERM; gives the program and both pids."""
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)\n"
        f"print('pid', child.pid, flush=True)\n{SLEEP}"
    )
    return RunningProgram([sys.executable, "-c", code], log=tmp_path / "log")


def wait_for_child(program):
    words = []
    while "up" not in words:
        words += " ".join(program.lines(0.1)).split()
    return int(words[words.index("pid") + 1])


def test_leaving_ends_every_descendant(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    with start_family(tmp_path) as program:
        pids = [program._process.pid, wait_for_child(program)]
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


def test_a_descendant_that_lost_its_parent_is_ended_too(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(process, "SWEEP_SECONDS", 0.0)
    with start_family(tmp_path) as program:
        child = wait_for_child(program)
        program.lines(0.0)
        os.kill(program._process.pid, signal.SIGKILL)
        while program.lines(0.1) is not None:
            pass
        assert is_alive(child)
    assert not is_alive(child)


def interrupt_itself(number, log, pids):
    with stop_signals_raise(), RunningProgram([sys.executable, "-c", SLEEP], log=log) as program:
        pids.append(program._process.pid)
        os.kill(os.getpid(), number)
        time.sleep(5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_end_the_program(tmp_path, number):
    pids = []
    with pytest.raises(Interrupted) as interrupted:
        interrupt_itself(number, tmp_path / "log", pids)
    assert interrupted.value.exit_code == 128 + number
    assert not any(map(is_alive, pids))


def test_a_signal_while_stopping_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    real_wait = psutil.wait_procs

    def interrupted_wait(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return real_wait(*arguments, **options)

    monkeypatch.setattr(process.psutil, "wait_procs", interrupted_wait)
    with pytest.raises(Interrupted), stop_signals_raise(), start_family(tmp_path) as program:
        child = wait_for_child(program)
    assert not is_alive(child)


def test_without_a_log_the_output_is_the_drivers_own(capfd):
    with RunningProgram([sys.executable, "-c", "print('seen')"]) as program:
        while program.lines(0.05) is not None:
            pass
        assert program.returncode == 0
    assert capfd.readouterr().out == "seen\n"
