"""The compiled part of megatron-core's datasets: wheels bring it, a Megatron-LM checkout has to be told to build it."""

from __future__ import annotations

import os
import sysconfig

import megatron.core

MODULE = "megatron.core.datasets.helpers_cpp"


def how_to_compile(error: BaseException) -> str | None:
    """What to run when `error` says that the compiled part is missing, in one line; None: it says something else."""
    if not isinstance(error, ModuleNotFoundError) or error.name != MODULE:
        return None
    directory = os.path.join(megatron.core.__path__[1], "datasets")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return (
        f"the dataset helpers of {directory} are not compiled for this Python: run "
        f"`pip install pybind11 && make -C {directory} LIBEXT={suffix}`"
    )
