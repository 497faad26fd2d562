"""The map of an analysis over a Dask cluster, for captures that one machine would read too slowly.

    dask scheduler                                             # on one machine
    dask worker tcp://SCHEDULER:8786 --nworkers auto --nthreads 1    # on each, from an environment with this package
    tensor_visualizer.py ... --dask-scheduler tcp://SCHEDULER:8786

Workers open the files themselves, by the paths that this process knows, so they need the same shared file system at
the same place; tensors do not travel, rows do. The rows come back in the order of the records and are merged as those
of a process pool, so the tables are the same, bit for bit. A worker that dies is replaced by the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.quantscope.analysis.errors import AnalysisError
from megatron.quantscope.analysis.workers import Workers

CONNECT_SECONDS = 10


class SchedulerError(AnalysisError):
    """The Dask scheduler can not be used."""


@contextmanager
def dask_pool(address: str) -> Iterator[Workers]:
    """Workers that are the threads of a Dask cluster, each computing on one core.

    Args:
        address: Of the scheduler, such as `tcp://10.0.0.1:8786`.

    Raises:
        SchedulerError: Dask is not installed, nothing answers there, it has no worker, or a task killed its workers.
    """
    with _connected(address) as client:
        threads = client.nthreads()
        if not threads:
            raise SchedulerError(f"the Dask scheduler at {address} has no workers: start some with `dask worker`")
        client.run(_one_thread)
        executor = client.get_executor(pure=False)
        try:
            yield Workers(sum(threads.values()), executor)
        except _killed() as error:
            raise SchedulerError(f"the Dask cluster at {address} gave up: {str(error).partition(chr(10))[0]}") from None
        finally:
            executor.shutdown(wait=False)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The client: of no type, since Dask has none."""
    try:
        from distributed import Client
    except ImportError:
        raise SchedulerError("--dask-scheduler needs Dask: pip install 'dask[distributed]'") from None
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it tells of every attempt to connect, and of connections that end
    try:
        try:
            connect: Any = Client
            client = connect(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise SchedulerError(f"no Dask scheduler answers at {address}: {reason}") from None
        with client:
            yield client
    finally:
        logger.setLevel(level)


def _killed() -> tuple[type[BaseException], ...]:
    from distributed import CancelledError, KilledWorker

    return (KilledWorker, CancelledError)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
