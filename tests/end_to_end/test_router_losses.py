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


SPLIT = {  # the tokens of a batch over two ranks
    "DP 2": [],
    "CP 2": ["--context-parallel-size", 2],
    "TP 2 with sequence parallelism": ["--tensor-model-parallel-size", 2, "--sequence-parallel"],
    "EP 2": ["--expert-model-parallel-size", 2],
    "PP 2": ["--pipeline-model-parallel-size", 2],
}


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory):
    """A checkpoint of a mixture, so that all layouts have the same weights."""
    directory = tmp_path_factory.mktemp("mixture")
    train(*EXPERTS[:2], "--moe-router-topk", 2, "--train-iters", 1, "--save", directory)
    return directory


def losses_of(train, saved, *flags, ranks=1):
    weighted = [*EXPERTS[:2], "--moe-router-topk", 2, *EXPERTS[4:]]
    run = train(*weighted, "--load", saved, "--no-load-optim", "--train-iters", 2, *flags, ranks=ranks)
    return {name: values_of(run, name)[0] for name in ("load_balancing_loss", "z_loss")}


SLOW = {"EP 2", "PP 2"}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.matrix] * (name in SLOW)) for name in SPLIT])
def test_the_z_loss_is_the_mean_over_all_tokens(train, saved, layout):
    """Of one rank's tokens alone it would be off by percents."""
    whole, split = losses_of(train, saved), losses_of(train, saved, *SPLIT[layout], ranks=2)
    assert split["z_loss"] == pytest.approx(whole["z_loss"], rel=1e-5)
    if "DP" not in layout and "EP" not in layout:  # where it is a mean of each rank's balance, which is another figure
        assert split["load_balancing_loss"] == pytest.approx(whole["load_balancing_loss"], rel=1e-5)


def test_without_experts_or_without_weight_nothing_is_said(train):
    assert "load_balancing_loss" not in train("--num-experts", 4, "--moe-router-topk", 2).output
