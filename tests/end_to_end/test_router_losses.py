"""What the log says of the losses that balance a router, where they are known beforehand.

If every token goes to every expert, the balancing loss is 1 whatever the router's weights: each expert has its share of
the tokens, and the probabilities of a token sum to 1.
"""

import re

import pytest

EXPERTS = ["--num-experts", 4, "--moe-router-topk", 4, "--moe-aux-loss-coeff", 0.01, "--moe-z-loss-coeff", 0.001]
LAYOUTS = {
    "one rank, two micro-batches": (1, []),
    "EP 2": (2, ["--expert-model-parallel-size", 2]),
    "PP 2, the first stage without experts": (2, ["--pipeline-model-parallel-size", 2, "--moe-layer-freq", "[0,1]"]),
}


def values_of(run, name):
    return [float(value) for value in re.findall(rf"\| {name}: (\S+) \|", run.output)]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.matrix] * (ranks > 1)) for name, (ranks, _) in LAYOUTS.items()]
)
def test_the_balancing_loss_of_tokens_that_go_everywhere_is_one(train, layout):
    ranks, flags = LAYOUTS[layout]
    run = train(*EXPERTS, *flags, ranks=ranks)
    assert values_of(run, "load_balancing_loss") == pytest.approx([1.0] * 3, rel=1e-5)
    assert len(values_of(run, "z_loss")) == 3


def test_without_experts_or_without_weight_nothing_is_said(train):
    assert "load_balancing_loss" not in train("--num-experts", 4, "--moe-router-topk", 2).output
