"""Forwards that run twice: kept once, at the first pass's moment, whichever micro-batch is running meanwhile."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.quantscope.capture.recompute import remembering
from megatron.quantscope.capture.state import STATE
from tests.quantscope.capture.conftest import LINEAR, linear_tensors, read, rows_of, show_backward, show_forward


class Product(torch.autograd.Function):
    """y = x w, which shows its tensors to a tap that is bound when its forward runs."""

    @staticmethod
    def forward(ctx, x, w, tap):
        ctx.save_for_backward(x, w)
        ctx.tap, y = tap, x * w
        if tap is not None:
            tap("forward", "pre", "input", x)
            tap("forward", "post", "output", y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if ctx.tap is not None:
            ctx.tap("backward", "pre", "grad_output", grad)
        return grad * w, grad * x, None


def test_without_a_session_it_is_the_function_itself():
    assert STATE.session is None
    assert remembering(print) is print


def test_of_a_session_that_is_closed_it_is_the_function_itself(open_session):
    session = open_session()
    assert remembering(print) is not print
    session.close()
    assert remembering(print) is print


def test_arguments_and_result_pass_through(open_session):
    open_session()
    assert remembering(lambda *args, **options: (args, options))(1, 2, a=3) == ((1, 2), {"a": 3})


def test_two_micro_batches_whose_backwards_come_in_reverse_order(open_session):
    """As under pipelining: two forwards, then each one's second forward and backward, while a third may be running."""
    session = open_session(collect_micro_batches=2)
    site, calls = session.site(**LINEAR), []
    session.begin_iteration(4)
    tensors = [linear_tensors(seed) for seed in range(2)]

    def forward(seed):
        tap = site.tap()
        if tap is not None:
            show_forward(tap, tensors[seed])
        return tap

    for micro_batch in range(2):
        session.begin_micro_batch(micro_batch, [100 + micro_batch], document_ids=[[micro_batch]], grad_scale=2.0)
        calls.append(remembering(forward))
        calls[-1](micro_batch)
    session.begin_micro_batch(2, [102])  # one that is not kept
    assert session.moment is None
    for micro_batch in (1, 0):
        show_backward(calls[micro_batch](micro_batch), tensors[micro_batch])
    session.end_iteration({})
    capture = read(session)
    assert len(capture.records) == 2 * 7
    for micro_batch in range(2):
        rows = rows_of(capture, micro_batch=micro_batch)
        assert len([row for row in rows if row.operation == "forward"]) == 3
        for row in rows:
            assert (row.iteration, row.sample_idx, row.document_ids) == (4, 100 + micro_batch, ((micro_batch,),))
            assert (row.recomputed, row.grad_scale) == (True, 2.0)
            assert torch.equal(capture.load(row), tensors[micro_batch][row.tensor_name])


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_pytorch_s_own_checkpointing(open_session, reentrant):
    """The captured rows are those of a run that recomputes nothing, but for their mark."""
    found = []
    for recompute in (False, True):
        session = open_session(quant_type=f"type{recompute}", collect_micro_batches=2)
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        weight, losses = torch.arange(1.0, 4.0, requires_grad=True), []
        for micro_batch in range(2):
            session.begin_micro_batch(micro_batch, [micro_batch])
            x = torch.full((3,), 2.0 + micro_batch, requires_grad=True)

            def layer(x, w, site=site):
                return Product.apply(x, w, site.tap()) + 1

            y = checkpoint(remembering(layer), x, weight, use_reentrant=reentrant) if recompute else layer(x, weight)
            losses.append((y * y).sum())
        for loss in reversed(losses):
            loss.backward()
        session.end_iteration({})
        session.close()
        assert session.failed is None
        from megatron.quantscope.capture import open_capture

        capture = open_capture(session.config.directory / f"type{recompute}")
        rows = {(r.micro_batch, r.operation, r.tensor_name): (r.checksum, r.recomputed) for r in capture.records}
        assert len(rows) == len(capture.records) == 2 * 3
        assert {recomputed for _, recomputed in rows.values()} == {recompute}
        found.append(({key: checksum for key, (checksum, _) in rows.items()}, weight.grad))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_what_was_not_kept_at_first_is_not_kept_at_the_second_pass(open_session):
    session = open_session()
    site = session.site(**LINEAR)
    taps = []
    session.begin_iteration(0)
    session.begin_micro_batch(1, [0])  # beyond --collect-micro-batches
    call = remembering(lambda: taps.append(site.tap()))
    call()
    session.begin_micro_batch(0, [1])
    call()
    assert taps == [None, None]
    assert site.tap() is not None


def test_a_forward_that_runs_once_is_kept_and_marked(open_session):
    """Evaluation of a loss without a backward: nothing asks for the second pass."""
    session = open_session()
    site = session.site(**LINEAR)
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    remembering(lambda: show_forward(site.tap(), linear_tensors()))()
    session.end_iteration({})
    assert [record.recomputed for record in read(session).records] == [True] * 3


@pytest.mark.parametrize("passes", [1, 2])
def test_the_moment_is_restored_after_an_exception(open_session, passes):
    session, fails = open_session(collect_micro_batches=2), []

    def forward():
        if len(fails) == passes - 1:
            fails.append(1)
            raise ZeroDivisionError
        fails.append(0)

    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    call = remembering(forward)
    for _ in range(passes - 1):
        call()
    session.begin_micro_batch(1, [1])
    before = session.moment
    with pytest.raises(ZeroDivisionError):
        call()
    assert session.moment is before


def test_one_within_another(open_session):
    """A recomputed block of recomputed layers: the inner ones are wrapped anew at each pass of the outer."""
    session = open_session()
    site, taps = session.site(**LINEAR), []
    session.begin_iteration(0)
    session.begin_micro_batch(0, [7])
    inner = []

    def layer():
        taps.append(site.tap())
        show_forward(taps[-1], linear_tensors())

    def block():
        inner.append(remembering(layer))
        inner[-1]()

    outer = remembering(block)
    outer()
    session.begin_micro_batch(1, [8])
    outer()
    inner[-1]()
    show_backward(taps[-1], linear_tensors())
    session.end_iteration({})
    capture = read(session)
    assert len(capture.records) == 7
    assert {record.sample_idx for record in capture.records} == {7}
