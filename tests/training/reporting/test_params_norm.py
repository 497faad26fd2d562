"""The norm of the parameters, against the root of the sum of their squares."""

import math

import pytest
import torch

from megatron.training.failure import SharedFailure
from megatron.training.reporting.params_norm import params_norm, require_equal_replicas

pytestmark = pytest.mark.usefixtures("one_rank")


def parameter(*values, **marks):
    made = torch.nn.Parameter(torch.tensor(values))
    vars(made).update(marks)
    return made


def model_of(**parameters):
    model = torch.nn.Module()
    for name, each in parameters.items():
        model.register_parameter(name, each)
    return model


def test_every_parameter_counts_once():
    chunks = [model_of(a=parameter(3.0, 4.0)), model_of(b=parameter(12.0), tied=parameter(9.0, shared=True))]
    assert params_norm(chunks) == 13.0


def test_the_optimizers_version_counts():
    master = torch.tensor([1.0, 2.0])
    whole = parameter(1.5, 2.5, main_param=master)
    split = parameter(9.0, 9.0, main_param=torch.tensor([2.0]), main_param_sharded=True)
    elsewhere = parameter(9.0, main_param=None, main_param_sharded=True)
    assert params_norm([model_of(whole=whole, split=split, elsewhere=elsewhere)]) == 3.0


def test_experts_count_over_their_own_ranks():
    model = model_of(dense=parameter(1.0), expert=parameter(1.0, 1.0, allreduce=False))
    assert params_norm([model]) == pytest.approx(math.sqrt(3))


def test_replicas_that_agree_and_that_do_not(monkeypatch):
    model = [model_of(a=parameter(3.0))]
    require_equal_replicas(model, 5)
    monkeypatch.setattr(
        "megatron.training.reporting.params_norm.check_param_hashes_across_dp_replicas",
        lambda _, cross_check: not cross_check,
    )
    with pytest.raises(SharedFailure, match="the data parallel ranks have different weights after iteration 5"):
        require_equal_replicas(model, 5)
