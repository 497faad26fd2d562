"""The loss that megatron-core is given, and the order of calls around a micro-batch."""

import numpy as np
import pytest
import torch

from megatron.core.attachment import gradient_scale
from megatron.training.data.batches import MicroBatch
from megatron.training.steps import LOSS, ForwardStep, summed_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_summed_loss_is_the_sum_over_tokens_that_count(dtype):
    generator = torch.Generator().manual_seed(1)
    losses = torch.randn(3, 16, generator=generator).to(dtype).requires_grad_()
    mask = torch.randint(0, 2, (3, 16), generator=generator).float()
    total, count, reported = summed_loss(mask, losses)
    values = losses.detach().float().numpy().astype(np.float64)
    assert total.item() == pytest.approx((values * mask.numpy()).sum(), abs=1e-4)
    assert (count.dtype, count.item()) == (torch.int32, int(mask.numpy().sum()))
    assert reported[LOSS].tolist() == [total.item(), count.item()]
    assert not reported[LOSS].requires_grad
    total.backward()
    assert torch.equal(losses.grad, mask.to(dtype))  # a token that does not count gets no gradient


def test_summed_loss_of_nothing():
    total, count, _ = summed_loss(torch.zeros(2, 4), torch.ones(2, 4))
    assert (total.item(), count.item()) == (0.0, 0)


def test_many_tokens_lose_no_precision():
    losses = torch.full((8, 8192), 11.0)
    total, count, _ = summed_loss(torch.ones(8, 8192), losses)
    assert total.item() / count.item() == pytest.approx(11.0, rel=1e-6)


def test_a_weight_changes_the_loss_and_not_what_is_reported():
    losses = torch.full((1, 4), 2.0, requires_grad=True)
    total, count, reported = summed_loss(torch.ones(1, 4), losses, weight=torch.tensor(0.5))
    assert (total.item(), count.item(), reported[LOSS].tolist()) == (4.0, 4, [8.0, 4.0])
    total.backward()
    assert losses.grad.tolist() == [[0.5] * 4]


class RecordingSession:
    """Stands for a capture session."""

    def __init__(self, calls):
        self.calls = calls

    def begin_micro_batch(self, number, sample_indices, *, document_ids, grad_scale):
        self.calls.append(("begin", number, sample_indices, document_ids, grad_scale))


def batch_of(index):
    tensors = {"tokens": torch.full((1, 4), index), "loss_mask": torch.ones(1, 4)}
    return MicroBatch(sample_indices=[index], document_ids=((index, 99),), **tensors)


def test_capture_hears_of_each_micro_batch_before_the_model_runs():
    calls = []

    def model(tokens, position_ids, attention_mask, labels):
        calls.append(("forward", tokens[0, 0].item()))
        return tokens.float()

    forward = ForwardStep(RecordingSession(calls))
    forward.grad_scale = 2.0
    data = iter([batch_of(7), batch_of(8)])
    for _ in range(2):
        output, to_loss = forward(data, model)
    assert calls == [
        ("begin", 0, [7], ((7, 99),), 2.0),
        ("forward", 7),
        ("begin", 1, [8], ((8, 99),), 2.0),
        ("forward", 8),
    ]
    assert to_loss(output)[0].item() == 32.0


def test_without_capture_the_model_just_runs():
    forward = ForwardStep()
    output, _ = forward(iter([batch_of(3)]), lambda tokens, *_, labels: tokens)
    assert output[0, 0].item() == 3


def test_chunks_of_an_interleaved_schedule_count_for_themselves():
    """Two chunks take turns, two micro-batches at a time, each from its own iterator; twice."""
    calls = []
    forward = ForwardStep(RecordingSession(calls))
    chunks = [iter([batch_of(index) for index in range(8)]) for _ in range(2)]
    for _ in range(2):
        forward.begin_iteration()
        for chunk in (0, 0, 1, 1, 0, 0, 1, 1):
            forward(chunks[chunk], lambda tokens, *_, labels: tokens)
    numbers = [0, 1, 0, 1, 2, 3, 2, 3]
    assert [(number, samples[0]) for _, number, samples, _, _ in calls] == [
        (number, number + 4 * iteration) for iteration in (0, 1) for number in numbers
    ]


class Scaled:
    """Stands for an optimizer with a loss scale."""

    def get_loss_scale(self):
        return torch.tensor([1024.0])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, 6.0),
        ({"fp16": True}, 6.0 * 1024),
        ({"bf16": True, "loss_scale": 1024.0}, 6.0 * 1024),
        ({"calculate_per_token_loss": True}, 1.0),
        ({"calculate_per_token_loss": True, "fp16": True}, 1024.0),
    ],
)
def test_gradient_scale(parse, monkeypatch, flags, expected):
    """Six ranks whose mean is taken: two that share a sequence, three such pairs."""
    from megatron.core import parallel_state

    sizes = {True: 6, False: 3}
    monkeypatch.setattr(
        parallel_state, "get_data_parallel_world_size", lambda with_context_parallel=False: sizes[with_context_parallel]
    )
    assert gradient_scale(parse(**flags), Scaled()) == expected
