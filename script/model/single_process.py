"""megatron-core in one process of its own: one rank, no launcher, no port.

megatron-core builds, saves and loads models only with a process group and its model-parallel groups in place. Here each
of them has this process as its one member, over a store in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SEED = 1234


@contextmanager
def model_parallel() -> Iterator[None]:
    """Make megatron-core usable inside the block, and leave nothing of it behind.

    A process that has its groups already keeps them, and works in them.
    """
    from megatron.training import cpu_device

    cpu_device.install()
    import torch.distributed

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    cpu_device.install_core()
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(SEED)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
