"""Recomputed forwards: kept once, with the coordinates of their first pass, and bit for bit what a plain run keeps."""

import inspect
from collections import Counter

import pytest
import torch

from megatron.core import tensor_parallel
from megatron.core.instrumentation import instrument
from megatron.core.tensor_parallel import random
from megatron.core.transformer import attention, transformer_block, transformer_layer
from megatron.quantscope.capture.recompute import remembering
from megatron.quantscope.capture.state import STATE
from megatron.quantscope.flags.capture import POINTS
from megatron.quantscope.gemm import QuantConfig

LAYERS, SEQUENCE, VOCABULARY = 2, 32, 128
MICRO_BATCHES = 3
KEPT_MICRO_BATCHES = 2
ORDERS = {"in turn": (0, 1, 2), "last first": (2, 1, 0), "mixed": (1, 2, 0)}

SUMS_IN_ANOTHER_ORDER = "selective, layernorm"  # upstream, without any capture: gradients that meet on the residual
MODES = {  # configuration -> which rows are recomputed
    "full, uniform, 1": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        lambda row: row.layer_idx is not None,
    ),
    "full, uniform, 2": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        lambda row: row.layer_idx is not None,
    ),
    "full, block, 1": (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        lambda row: row.layer_idx == 0,
    ),
    "selective, core_attn": (
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        lambda row: row.layer_type == "attention",
    ),
    "selective, mlp": (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        lambda row: ".mlp" in row.module,
    ),
    SUMS_IN_ANOTHER_ORDER: (
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        lambda row: row.layer_type == "norm" and row.layer_idx is not None,
    ),
}


@pytest.fixture(autouse=True)
def norms_can_be_recomputed(monkeypatch):
    """0.16.1 asks whether its option fp8, False by default, is None, and then for TransformerEngine: its own slip."""
    monkeypatch.setattr(random.CheckpointWithoutOutput.__init__, "__defaults__", (None,))


def loss_of(model, micro_batch):
    ids = ((torch.arange(SEQUENCE + 1) * (3 + 2 * micro_batch) + micro_batch) % VOCABULARY)[None]
    return model(ids[:, :-1], torch.arange(SEQUENCE)[None], None, labels=ids[:, 1:]).mean()


def train(model, session, order, quant_type="none"):
    """Forwards of all micro-batches, then their backwards in `order`, as a pipeline schedule may have them."""
    if session is not None:
        instrument([model], recipe=QuantConfig(quant_type=quant_type), session=session, num_layers=LAYERS)
        session.begin_iteration(4)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    losses = []
    for micro_batch in range(MICRO_BATCHES):
        if session is not None:
            session.begin_micro_batch(micro_batch, [10 + micro_batch])
        losses.append(loss_of(model, micro_batch))
    for micro_batch in order:
        losses[micro_batch].backward()
    if session is not None:
        assert session.moment is None  # the third micro-batch's, which is not kept: backwards put back what they found
    return [loss.detach() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


def key_of(row):
    place = row.iteration, row.micro_batch, row.sample_indices, row.module, row.layer_type
    return *place, row.operation, row.phase, row.tensor_name


def session_of(open_session):
    return open_session(collect_micro_batches=KEPT_MICRO_BATCHES, points=frozenset(POINTS), control_iter=0)


@pytest.mark.parametrize("quant_type", ["none", "mxfp8"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_a_run_without_recomputation(build_model, open_session, mode, quant_type):
    overrides, is_recomputed = MODES[mode]
    plain, again = session_of(open_session), session_of(open_session)
    STATE.session = plain
    losses, gradients = train(build_model(), plain, ORDERS["mixed"], quant_type)
    STATE.session = again
    recomputed_losses, recomputed_gradients = train(build_model(**overrides), again, ORDERS["mixed"], quant_type)

    assert Counter(key_of(row) for row, _ in again.rows) == Counter(key_of(row) for row, _ in plain.rows)
    assert max(Counter(key_of(row) for row, _ in again.rows).values()) == 1
    expected = {key_of(row): tensor for row, tensor in plain.rows}
    for row, tensor in again.rows:
        assert row.recomputed == is_recomputed(row), key_of(row)
        if mode == SUMS_IN_ANOTHER_ORDER and row.operation == "backward":
            torch.testing.assert_close(tensor, expected[key_of(row)], rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(tensor, expected[key_of(row)]), key_of(row)
    assert {row.micro_batch for row, _ in again.rows} == set(range(KEPT_MICRO_BATCHES))
    assert not any(row.recomputed for row, _ in plain.rows)
    assert all(map(torch.equal, losses, recomputed_losses))
    if mode != SUMS_IN_ANOTHER_ORDER:
        assert all(torch.equal(gradient, recomputed_gradients[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_backwards_in_any_order_carry_the_coordinates_of_their_forward(build_model, open_session, order):
    """The gradient of a micro-batch's loss differs from another's, so a row under a wrong number would show."""
    session = session_of(open_session)
    overrides, _ = MODES["full, uniform, 1"]
    train(build_model(**overrides), session, order)
    for micro_batch in range(KEPT_MICRO_BATCHES):
        alone = build_model()
        alone_session = session_of(open_session)
        instrument([alone], recipe=None, session=alone_session, num_layers=LAYERS)
        alone_session.begin_iteration(4)
        alone_session.begin_micro_batch(micro_batch, [10 + micro_batch])
        loss_of(alone, micro_batch).backward()
        expected = {key_of(row): tensor for row, tensor in alone_session.rows}
        found = {key_of(row): tensor for row, tensor in session.rows if row.micro_batch == micro_batch}
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


def test_dropout_is_drawn_again_the_same(build_model, open_session):
    dropouts = {"attention_dropout": 0.2, "hidden_dropout": 0.1}
    overrides, _ = MODES["full, uniform, 1"]
    sessions = [session_of(open_session) for _ in range(2)]
    for session, more in zip(sessions, ({}, overrides), strict=True):
        STATE.session = session
        train(build_model(**dropouts, **more), session, ORDERS["last first"], "mxfp8")
    plain, again = ({key_of(row): tensor for row, tensor in session.rows} for session in sessions)
    assert plain.keys() == again.keys()
    assert all(torch.equal(tensor, plain[key]) for key, tensor in again.items())


@pytest.mark.parametrize("mode", MODES)
def test_capture_changes_no_bit_of_a_recomputed_run(build_model, open_session, mode):
    overrides, _ = MODES[mode]
    losses, gradients = train(build_model(**overrides), None, ORDERS["mixed"])
    kept_losses, kept_gradients = train(build_model(**overrides), session_of(open_session), ORDERS["mixed"])
    assert all(map(torch.equal, losses, kept_losses))
    assert all(torch.equal(gradient, kept_gradients[name]) for name, gradient in gradients.items())


def test_evaluation_keeps_nothing(build_model, open_session):
    session = session_of(open_session)
    model = build_model(**MODES["full, uniform, 1"][0])
    instrument([model], recipe=None, session=session, num_layers=LAYERS)
    session.begin_iteration(0)
    with session.suspended():
        session.begin_micro_batch(0, [0])
        loss_of(model, 0).backward()
    assert session.rows == []


def test_checkpoints_in_checkpoints_are_kept_once(open_session):
    """The inner function runs three times: in the first outer forward, in the second, and for its own backward."""
    session = session_of(open_session)
    site = session.site(module="m", layer_type="linear", component="linear", layer_idx=0, formats={})
    calls = []

    def inner(x):
        calls.append(session.moment.replaying)
        tap = site.tap()
        tap("forward", "pre", "input", x)
        y = x * x
        if y.requires_grad:
            y.register_hook(lambda grad: tap("backward", "pre", "grad_output", grad))
        return y

    def outer(x):
        return random.checkpoint(inner, False, x) + 1

    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    x = torch.randn(3, requires_grad=True)
    y = random.checkpoint(outer, False, x)
    session.begin_micro_batch(1, [1])
    y.sum().backward()
    assert calls == [False, True, True]
    rows = [(row.operation, row.micro_batch, row.recomputed) for row, _ in session.rows]
    assert rows == [("forward", 0, True), ("backward", 0, True)]
    assert torch.equal(x.grad, 2 * x)


def test_a_function_that_raises_leaves_the_moment_alone(open_session):
    session = session_of(open_session)
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    before = session.moment

    def raising(x):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        random.checkpoint(raising, False, torch.ones(1, requires_grad=True))
    assert session.moment is before


def test_without_a_session_the_function_itself_is_run(one_rank, monkeypatch):
    given = []
    monkeypatch.setattr(random.CheckpointFunction, "apply", lambda function, *_: given.append(function))
    monkeypatch.setattr(random.CheckpointWithoutOutputFunction, "apply", lambda function, *_: given.append(function))
    random.checkpoint(loss_of, False)
    random.CheckpointWithoutOutput().checkpoint(loss_of)
    assert STATE.session is None
    assert given == [loss_of, loss_of]
    assert remembering(loss_of) is loss_of


@pytest.mark.parametrize("user", [transformer_block, transformer_layer, attention])
def test_upstream_calls_ours(user):
    """Each of them calls `tensor_parallel.checkpoint` or `tensor_parallel.CheckpointWithoutOutput()`."""
    assert user.tensor_parallel is tensor_parallel
    assert tensor_parallel.checkpoint is random.checkpoint
    assert inspect.getsourcefile(random.checkpoint.__code__).endswith("megatron/core/tensor_parallel/random.py")
    ours = {random.checkpoint.__code__.co_filename, random.CheckpointWithoutOutput.checkpoint.__code__.co_filename}
    assert ours == {random.__file__}
    assert inspect.unwrap(random.checkpoint).__code__.co_filename == random.__upstream_file__
    assert tensor_parallel.CheckpointWithoutOutput is random.CheckpointWithoutOutput
