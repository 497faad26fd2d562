"""Which tests run: slow ones on request, GPU ones where there is a GPU; and one CPU stand-in for the whole process."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: more threads only take turns


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too (the real model, minutes)")
    parser.addoption("--matrix", action="store_true", help="run the tests marked matrix too (every parallel layout)")


def pytest_configure(config):
    """Answer CUDA requests with the CPU, and let Triton interpret its kernels, before a module imports megatron.core.

    The order matters: megatron.core imports Triton, which reads its variable once.
    """
    import torch

    from megatron.training import cpu_device

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    cpu_device.install()


def pytest_collection_modifyitems(config, items):
    import torch

    missing = {
        "matrix": None if config.getoption("--matrix") else "matrix: run with --matrix",
        "slow": None if config.getoption("--slow") else "slow: run with --slow",
        "gpu": None if torch.cuda.is_available() else "gpu: this machine has no CUDA device",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
