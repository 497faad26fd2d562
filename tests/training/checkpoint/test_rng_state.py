"""The random state of a rank, taken and put back."""

import io
import random

import numpy as np
import pytest
import torch

from megatron.training.checkpoint.rng_state import rng_state, set_rng_state


def draw():
    """A few numbers of every generator; a second normal number of the pair that Python and numpy make at once."""
    from megatron.core import tensor_parallel

    with tensor_parallel.get_cuda_rng_tracker().fork():
        tracked = torch.rand(2).tolist()
    return [random.gauss(0, 1), random.random(), *np.random.normal(size=3), *torch.rand(2).tolist(), *tracked]  # noqa: NPY002


@pytest.fixture
def _seeded(one_rank):
    from megatron.core import tensor_parallel

    before = rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    random.gauss(0, 1)
    np.random.normal()  # noqa: NPY002
    yield
    set_rng_state(before)


@pytest.mark.usefixtures("_seeded")
def test_numbers_repeat_after_a_way_through_a_file():
    file = io.BytesIO()
    torch.save(rng_state(), file)
    drawn = draw()
    assert draw() != drawn
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))  # plain data only
    assert draw() == drawn
