"""A stock Megatron-LM trainer on a machine without a GPU: to try a command line where there is none.

The stand-in for CUDA is the one of this tree's trainer, loaded by its path: `megatron.training` is Megatron-LM's here.
On top of it, what their trainer asks of CUDA beyond megatron.core. Flags that only a GPU can honour get another
default, so that a short command line trains; what is given by hand stays. With a GPU present nothing is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STAND_IN = Path(__file__).resolve().parents[2] / "megatron" / "training" / "cpu_device.py"
# What their trainer asks of torch.cuda beyond what megatron.core does -> the answer.
ANSWERS: dict[str, Callable[..., Any]] = {
    "memory_stats": lambda device=None: {},
    "device_memory_used": lambda device=None: 0,
    "set_stream": lambda stream: None,
    "get_device_capability": lambda device=None: (0, 0),
    "get_device_properties": lambda device=None: types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0),
}
# Destination -> default where there is no GPU.
DEFAULTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
}


@functools.cache
def _stand_in() -> Any:
    spec = importlib.util.spec_from_file_location("quantscope_cpu_device", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install() -> None:
    """Answer CUDA requests with the CPU from now on; call before megatron.core is imported."""
    if torch.cuda.is_available():
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which theirs insists on for tensor parallelism
    _stand_in().install()
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, answer)


def install_core() -> None:
    """Answer what megatron.core asks by other ways; call after it is imported."""
    _stand_in().install_core()


def install_trainer() -> None:
    """Let their trainer start without a GPU; call after it is imported."""
    if torch.cuda.is_available():
        return
    trainer = importlib.import_module("megatron.training.training")
    trainer.initialize_megatron = functools.partial(trainer.initialize_megatron, allow_no_cuda=True)
    # It warms up kernels that are not used here, with random numbers: other weights would then be drawn than by ours.
    trainer.set_jit_fusion_options = lambda *_, **__: None
    with contextlib.suppress(ModuleNotFoundError):  # not in every version
        importlib.import_module("megatron.legacy.fused_kernels").load = lambda args: None  # compiles CUDA


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Give those flags of `parser` that only a GPU can honour the defaults of `DEFAULTS`."""
    if not torch.cuda.is_available():
        known = {action.dest for action in parser._actions}
        parser.set_defaults(**{name: value for name, value in DEFAULTS.items() if name in known})
