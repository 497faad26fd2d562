import os
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest
import torch

from megatron.quantscope.analysis.workers import default_workers, worker_pool

PARENT = """
import sys, time
from megatron.quantscope.analysis.workers import worker_pool
with worker_pool(2) as pool:
    list(pool.map(abs, range(4)))
    print("ready", flush=True)
    time.sleep(60)
"""


def _threads(_):
    return torch.get_num_threads()


def _die(_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_order_and_from_one_thread_each(count):
    before = torch.get_num_threads()
    with worker_pool(count) as pool:
        assert list(pool.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        assert set(pool.map(_threads, range(4))) == {1}
        assert list(pool.map(abs, [])) == []
    assert torch.get_num_threads() == before


def test_few_tasks_are_taken_at_a_time():
    taken = []

    def tasks():
        for number in range(1000):
            taken.append(number)
            yield number

    with worker_pool(2) as pool:
        results = pool.map(abs, tasks())
        assert next(results) == 0
        assert len(taken) < 100


def test_a_killed_worker_is_noticed():
    with pytest.raises(BrokenProcessPool), worker_pool(2) as pool:
        list(pool.map(_die, range(3)))


def test_an_error_in_a_worker_comes_out_here():
    with pytest.raises(TypeError), worker_pool(2) as pool:
        list(pool.map(len, [3]))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(end):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it
    )
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 3  # the server and two workers
    parent.send_signal(end)
    parent.wait(20)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_default_is_the_cores_of_this_process():
    assert 1 <= default_workers() <= (os.cpu_count() or 1)
