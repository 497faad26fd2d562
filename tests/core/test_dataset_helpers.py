"""The line that says how to compile the helpers of a checkout."""

import importlib

import pytest

import megatron.core
from megatron.core.dataset_helpers import MODULE, how_to_compile


def test_the_module_is_the_one_that_datasets_import():
    assert importlib.import_module(MODULE).build_sample_idx_int32


def test_the_line_names_the_command():
    line = how_to_compile(ModuleNotFoundError(f"No module named {MODULE!r}", name=MODULE))
    assert f"make -C {megatron.core.__path__[1]}/datasets LIBEXT=.cpython-3" in line
    assert "\n" not in line


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="pybind11"), OSError("disk")])
def test_another_error_is_not_explained(error):
    assert how_to_compile(error) is None
