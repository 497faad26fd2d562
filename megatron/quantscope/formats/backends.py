"""The programs that can run a format, and which one does: a table.

    cpp        C++ on the CPU: the one that trains. Needs a compiler, once.
    triton     Triton on CUDA: the one that trains there. On a CPU only in Triton's interpreter, for tests.
    torch      eager torch on any device: where neither of these is. 10 to 20 times slower than a copy.
    reference  slow and plain, to be checked by eye: what the others are held against, bit by bit, and what runs a
               record of one's own that is too strange for them.

`auto` is the first of these that can. No caller knows which one ran, but for the time it took.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from megatron.quantscope.formats.cpp_build import library
from megatron.quantscope.formats.job import Job

AUTO = "auto"
TRITON_INTERPRETS = "TRITON_INTERPRET"  # Triton's own variable


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A program that runs formats.

    Attributes:
        module: Where it is, below this package; imported when it is first used.
        takes: Whether it can run a job on a tensor.
        lacks: Why it can not run here at all, or None if it can.
        needs: What it takes, for the message when it does not.
    """

    module: str
    takes: Callable[[Tensor, Job], bool]
    lacks: Callable[[], str | None]
    needs: str

    def load(self) -> ModuleType:
        """The module: `run(x, out, job)`, and `encode` and `run_both` where it has them."""
        return import_module(f"megatron.quantscope.formats.{self.module}")


def prepare() -> None:
    """Compile the C++ kernels now: before the first step of a run rather than within it."""
    BACKENDS["cpp"].lacks()


def backend_for(x: Tensor, job: Job, name: str = AUTO) -> ModuleType:
    """The module of the backend of a name, or of the first that can run the job.

    Raises:
        ValueError: There is no such backend, it is not available here, or it can not take x.
    """
    if name == AUTO:
        candidates = (BACKENDS[key] for key in (_ON_CPU if x.device.type == "cpu" else _ON_DEVICE))
        return next(b.load() for b in candidates if b.lacks() is None and b.takes(x, job))
    backend = BACKENDS.get(name)
    if backend is None:
        raise ValueError(f"unknown backend {name!r}: choose from {', '.join((AUTO, *BACKENDS))}")
    if reason := backend.lacks():
        raise ValueError(f"backend {name!r} is not available here: {reason}")
    if not backend.takes(x, job):
        raise ValueError(f"backend {name!r} does not take {x.dtype} on {x.device} in {job.fmt.name}: {backend.needs}")
    return backend.load()


def _cpp_takes(x: Tensor, job: Job) -> bool:
    from megatron.quantscope.formats.cpp_backend import can_run

    return x.device.type == "cpu" and can_run(job.fmt)


def _cpp_lacks() -> str | None:
    return None if library() is not None else "the C++ kernels could not be compiled (the warning says why)"


def _triton_takes(x: Tensor, job: Job) -> bool:
    from megatron.quantscope.formats.triton_backend import DTYPES, can_run

    is_there = x.is_cuda or os.environ.get(TRITON_INTERPRETS) == "1"
    return is_there and x.dtype in DTYPES and can_run(job.fmt)


@cache
def _triton_lacks() -> str | None:
    return None if find_spec("triton") is not None else "the package triton is not installed"


def _torch_takes(x: Tensor, job: Job) -> bool:
    from megatron.quantscope.formats.torch_backend import can_run

    return can_run(job.fmt)


def _always(x: Tensor, job: Job) -> bool:
    return True


def _nothing() -> None:
    return None


BACKENDS: dict[str, Backend] = {
    "cpp": Backend(module="cpp_backend", takes=_cpp_takes, lacks=_cpp_lacks, needs="CPU tensors of a built-in format"),
    "triton": Backend(
        module="triton_backend",
        takes=_triton_takes,
        lacks=_triton_lacks,
        needs="CUDA tensors of bf16, fp16 or fp32 (on a CPU, TRITON_INTERPRET=1)",
    ),
    "torch": Backend(module="torch_backend", takes=_torch_takes, lacks=_nothing, needs="a built-in format"),
    "reference": Backend(module="reference", takes=_always, lacks=_nothing, needs="anything"),
}
_ON_CPU, _ON_DEVICE = ("cpp", "torch", "reference"), ("triton", "torch", "reference")
