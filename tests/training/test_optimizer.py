"""The schedules of learning rate and weight decay, against their formulas over iterations."""

import math
from types import SimpleNamespace

import pytest

from megatron.training.optimizer import build_scheduler

BATCH, STEPS, LR = 4, 20, 1e-3


@pytest.fixture
def course(parse):
    """`course(**changes)` -> (learning rate, weight decay) of each of 20 iterations of 4 samples."""

    def run(**changes):
        args = parse(**({"train_iters": STEPS, "global_batch_size": BATCH, "lr": LR} | changes))
        group = {"wd_mult": 1.0}
        scheduler = build_scheduler(args, SimpleNamespace(param_groups=[group]))
        values = []
        for _ in range(STEPS):
            values.append((group["lr"], group["weight_decay"]))
            scheduler.step(increment=BATCH)
        return values

    return run


def rates(values):
    return [rate for rate, _ in values]


def test_linear_decay_over_the_whole_run(course):
    assert rates(course(min_lr=1e-4)) == pytest.approx([LR - (LR - 1e-4) * n / STEPS for n in range(STEPS)])


def test_cosine_with_warm_up_and_an_early_end(course):
    warmup, decay = 4, 16
    expected = [LR * n / warmup for n in range(warmup)]
    expected += [LR * (1 + math.cos(math.pi * (n - warmup) / (decay - warmup))) / 2 for n in range(warmup, decay)]
    expected += [0.0] * (STEPS - decay)
    by_iterations = {"lr_warmup_iters": warmup, "lr_decay_iters": decay}
    by_samples = {"lr_warmup_samples": warmup * BATCH, "lr_decay_samples": decay * BATCH}
    samples = {"train_iters": None, "train_samples": STEPS * BATCH}
    assert rates(course(lr_decay_style="cosine", **by_iterations)) == pytest.approx(expected)
    assert rates(course(lr_decay_style="cosine", **by_samples, **samples)) == pytest.approx(expected)
    fraction = {"lr_warmup_fraction": warmup / decay, "lr_decay_iters": decay}
    assert rates(course(lr_decay_style="cosine", **fraction)) == pytest.approx(expected)


def test_warm_up_starts_where_the_flag_says(course):
    found = rates(course(lr_decay_style="constant", lr_warmup_iters=4, lr_warmup_init=2e-4))
    assert found == pytest.approx([2e-4 + 8e-4 * n / 4 for n in range(4)] + [LR] * (STEPS - 4))


def test_wsd_decays_at_the_end(course):
    found = rates(course(lr_decay_style="WSD", lr_wsd_decay_iters=5, lr_wsd_decay_style="linear"))
    assert found == pytest.approx([LR] * 15 + [LR * (1 - n / 5) for n in range(5)])


def test_weight_decay_is_constant_or_grows(course):
    assert [decay for _, decay in course(weight_decay=0.3)] == [0.3] * STEPS
    growing = course(weight_decay_incr_style="linear", start_weight_decay=0.1, end_weight_decay=0.5)
    assert [decay for _, decay in growing] == pytest.approx([0.1 + 0.4 * n / STEPS for n in range(STEPS)])
