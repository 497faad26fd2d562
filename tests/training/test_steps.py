"""The loss that megatron-core is given, and the order of calls around a micro-batch."""

import numpy as np
import pytest
import torch

from megatron.training.batches import MicroBatch
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


class RecordingSession:
    """Stands for a capture session."""

    def __init__(self, calls):
        self.calls = calls

    def begin_micro_batch(self, number, sample_indices):
        self.calls.append(("begin", number, sample_indices))


def batch_of(index):
    return MicroBatch(sample_indices=[index], tokens=torch.full((1, 4), index), loss_mask=torch.ones(1, 4))


def test_capture_hears_of_each_micro_batch_before_the_model_runs():
    calls = []

    def model(tokens, position_ids, attention_mask, labels):
        calls.append(("forward", tokens[0, 0].item()))
        return tokens.float()

    forward = ForwardStep(RecordingSession(calls))
    data = iter([batch_of(7), batch_of(8)])
    for _ in range(2):
        output, to_loss = forward(data, model)
    assert calls == [("begin", 0, [7]), ("forward", 7), ("begin", 1, [8]), ("forward", 8)]
    assert to_loss(output)[0].item() == 32.0


def test_without_capture_the_model_just_runs():
    forward = ForwardStep()
    output, _ = forward(iter([batch_of(3)]), lambda tokens, *_, labels: tokens)
    assert output.tolist() == [[3, 3, 3, 3]]
    assert forward.micro_batch == 1
