"""Two runs compare bit by bit: what differs, and what differs first."""

import math

import pytest
import torch

from megatron.training.rehearsal import step_trace
from megatron.training.rehearsal.step_trace import (
    Difference,
    StepTrace,
    differing,
    fingerprint,
    first_difference,
    trace,
)
from megatron.training.steps import Step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def step(loss=1.0, norm=0.5):
    return Step(loss=loss, grad_norm=norm, zeros=None, updated=True, finite=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    tensor = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    prints = {fingerprint(tensor)}
    words = tensor.view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)
    for place in (0, 52, 104):
        words[place] ^= 1
        prints.add(fingerprint(tensor))
    assert len(prints) == 4
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))


@pytest.mark.parametrize("pieces", [1, 2, 9, 105])
def test_pieces_cover_the_whole(monkeypatch, pieces):
    """A tensor that is brought over in pieces is seen to its last element, also one that is not contiguous."""
    tensor = torch.arange(105.0).reshape(15, 7).T
    monkeypatch.setattr(step_trace, "PIECE_BYTES", tensor.nbytes // pieces)
    whole = fingerprint(tensor)
    assert len(whole.split()) >= pieces
    assert fingerprint(tensor.contiguous()) == whole
    for index in ((0, 0), (6, 14), (3, 7)):
        changed = tensor.clone()
        changed[index] = -1.0
        assert fingerprint(changed) != whole


def test_no_elements_at_all():
    assert fingerprint(torch.zeros(0, 4)) == fingerprint(torch.zeros(3, 0))


def chunk(value=1.0, *, with_copy=True):
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.fill_(value)
            parameter.main_grad = torch.full_like(parameter, number)
            if with_copy:
                parameter.main_param = torch.full_like(parameter, value / 3)
    return layer


def test_a_trace_holds_loss_gradients_norm_parameters_and_their_copies():
    model = [chunk()]
    made = trace(step(), step_trace.gradient_prints(model), model)
    kinds = list(dict.fromkeys(kind for kind, _ in made.prints))
    assert kinds == ["loss", "gradient", "gradient norm", "parameter"]
    assert (made.count("gradient"), made.count("parameter")) == (2, 4)
    frozen = torch.nn.Linear(1, 1)
    assert step_trace.gradient_prints([frozen]) == {}
    assert [name for _, name in step_trace.gradient_prints([chunk(), chunk()])] == [
        "chunk 0: weight",
        "chunk 0: bias",
        "chunk 1: weight",
        "chunk 1: bias",
    ]


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (lambda layer: layer.bias.main_grad.add_(1e-6), "gradient", "bias"),
        (lambda layer: layer.weight.data[1].add_(1e-6), "parameter", "weight"),
        (lambda layer: layer.weight.main_param.mul_(1 + 1e-6), "parameter", "weight (float32 copy)"),
    ],
)
def test_the_first_difference_is_named(change, kind, name):
    def traces(other):
        layer = chunk()
        first = trace(step(), step_trace.gradient_prints([layer]), [layer])
        if other:
            change(layer)
        return [first, trace(step(), step_trace.gradient_prints([layer]), [layer])]

    assert first_difference(traces(False), traces(False), 3) is None
    found = first_difference(traces(False), traces(True), 3)
    assert (found.step, found.rank, found.kind, found.name) == (1, 3, kind, name)
    assert str(found) == f"step 2, {kind} of {name} on rank 3"
    assert differing(traces(False)[1], traces(True)[1])[kind] == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((1.0, 2.0), (1.0, 2.0), True),
        ((1.0, 2.0), (math.nextafter(1.0, 2.0), 2.0), False),
        ((1.0, 2.0), (1.0, math.nextafter(2.0, 0.0)), False),
        ((math.nan, None), (math.nan, None), True),
        ((math.nan, None), (math.inf, None), False),
    ],
)
def test_loss_and_norm_are_compared_in_every_bit(one, other, same):
    traces = [[trace(step(*values), {}, [])] for values in (one, other)]
    assert (first_difference(*traces, 0) is None) == same


def test_what_comes_first_in_the_run_is_the_least():
    """Over ranks: the earlier step, then what is earlier in the step."""
    late = Difference(1, 0, 0, "loss", "")
    gradient, parameter = Difference(0, 3, 1, "gradient", "a"), Difference(0, 9, 0, "parameter", "b")
    assert min(late, parameter, gradient) == gradient
    assert isinstance(StepTrace(step(), {}).count("loss"), int)
