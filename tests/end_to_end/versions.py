"""What older versions of megatron-core do otherwise, as marks of the tests that can not hold there."""

import pytest

import megatron.core


def _is(*versions):
    return megatron.core.__version__.startswith(tuple(f"{version}." for version in versions))


same_weights = pytest.mark.skipif(
    _is("0.14", "0.15"),
    reason="megatron-core before 0.16 draws a gated MLP's first weights otherwise at every tensor parallel size",
)
state_of_one_layout = pytest.mark.skipif(
    _is("0.14"), reason="megatron-core 0.14 stores the distributed optimizer's state in a form that fits every layout"
)
