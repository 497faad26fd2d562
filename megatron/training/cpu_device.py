"""Run megatron-core on a machine without a GPU: its hard-coded CUDA requests are answered with the CPU.

megatron-core asks for `device="cuda"`, `torch.cuda.current_device()`, CUDA streams and CUDA's random state without
looking whether there is a GPU. `install()`, called before megatron.core is imported, answers each of them; what is
answered, and how, stands in the tables below and nowhere else:

    FACTORIES        torch functions that take `device=`: a CUDA device becomes the CPU, pinned memory ordinary memory
    CUDA_ANSWERS     functions and classes of `torch.cuda`
    TENSOR_ANSWERS   methods of `torch.Tensor`
    TORCH_ANSWERS    `torch.compile` (needs a C++ compiler, and its import alone costs a second) and the barrier

`install_core()`, called once megatron.core is imported, replaces the functions there that read CUDA's random state
through the C++ binding, and the one that brings numbers of tokens to the host only where they are on a GPU. With a GPU
present both do nothing, but for one name that megatron-core 0.16 needs with and without one.

Why functions and not a TorchFunctionMode: the mode is local to a thread, taxes every operation and is not seen by
backward. Traps: each replaced function must be an object of its own, or `torch._dynamo` refuses to import ("duplicate
torch object"); `torch.cuda.manual_seed_all` must stay, since `torch.manual_seed` calls it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

# fmt: off
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)
# Requests about streams, memory and devices that mean nothing on a CPU.
NOTHING_TO_DO = (
    "empty_cache", "init", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize", "nvtx.range_pop",
    "nvtx.range_push",
)
NO_BYTES = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
# fmt: on


class Event:
    """A CUDA event: everything recorded has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing is asynchronous."""

    def wait(self, stream: Any = None) -> None:
        """Nothing is asynchronous."""

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def query(self) -> bool:
        """The work before this event is done."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """No time is measured."""
        return 0.0


class Stream:
    """A CUDA stream: work runs when it is called, in the order of the program."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing is asynchronous."""

    def wait_event(self, event: Any) -> None:
        """Nothing is asynchronous."""

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> bool:
        return False


def install() -> None:
    """Answer CUDA requests with the CPU from now on; call before megatron.core is imported, again is harmless."""
    if torch.cuda.is_available() or hasattr(torch.cuda, "answered_by"):
        return
    torch.cuda.answered_by = __name__
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for owner, answers in ((torch.cuda, CUDA_ANSWERS), (torch.Tensor, TENSOR_ANSWERS), (torch, TORCH_ANSWERS)):
        for path, answer in answers.items():
            *outer, name = path.split(".")
            setattr(functools.reduce(getattr, outer, owner), name, answer)


def install_core() -> None:
    """Answer what megatron.core asks by other ways than `torch.cuda`; call after it is imported, again is harmless."""
    _let_routers_do_without_transformer_engine()
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = _get_random_state
    random._set_cuda_rng_state = _set_random_state
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _on_host


def _let_routers_do_without_transformer_engine() -> None:
    """Give the name that megatron-core 0.16's router asks for, and that is only there with TransformerEngine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron-core's `maybe_move_tensor_to_cpu` of a tensor that is on the CPU: numpy where that was asked for."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _as_cpu(device: Any) -> Any:
    """The CPU for a CUDA device, given as a number, a name or a `torch.device`; anything else as it is."""
    if isinstance(device, bool):
        return device
    names_cuda = isinstance(device, str | torch.device) and torch.device(device).type == "cuda"
    return CPU if names_cuda or isinstance(device, int) else device


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def answered(*args: Any, **options: Any) -> Any:
        if options.get("device") is not None:
            options["device"] = _as_cpu(options["device"])
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return factory(*args, **options)

    return answered


def _constant(value: Any) -> Callable[..., Any]:
    """A function of its own (see the traps above) that returns `value` for any arguments."""
    return lambda *_, **__: value


def _get_random_state(device: Any = None, **_: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: Any = None, **_: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


_tensor_to, _tensor_type, _barrier = torch.Tensor.to, torch.Tensor.type, torch.distributed.barrier


def _to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    if options.get("device") is not None:
        options["device"] = _as_cpu(options["device"])
    return _tensor_to(self, *map(_as_cpu, args), **options)


def _type(self: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The optimizers compare `parameter.type()` with 'torch.cuda.FloatTensor'."""
    if args or options:
        return _tensor_type(self, *args, **options)
    return _tensor_type(self).replace("torch.", "torch.cuda.", 1)


def _compile(model: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """`torch.compile` without compiling, as a call and as a decorator with arguments."""
    return model if model is not None else lambda function: function


def _barrier_without_devices(*args: Any, device_ids: Any = None, **options: Any) -> Any:
    return _barrier(*args, **options)  # gloo refuses device_ids


CUDA_ANSWERS: dict[str, Any] = {
    "current_device": _constant(CPU),
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": _seed,
    "initial_seed": lambda: torch.initial_seed(),
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda *_, **__: Stream(),
    "default_stream": lambda *_, **__: Stream(),
    "stream": lambda stream: contextlib.nullcontext(),
    **{name: _constant(None) for name in NOTHING_TO_DO},
    **{name: _constant(0) for name in NO_BYTES},
}
TENSOR_ANSWERS: dict[str, Any] = {"cuda": lambda self, *_, **__: self, "to": _to, "type": _type}
TORCH_ANSWERS: dict[str, Any] = {"compile": _compile, "distributed.barrier": _barrier_without_devices}
