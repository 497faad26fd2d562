"""Evaluation only looks: training, its random state and what is kept are those of a run without it."""

import re
from collections import Counter

import pytest

from megatron.quantscope.capture import open_capture
from tests.end_to_end.conftest import pretrain
from tests.training.log_lines import iterations, values

ITERATIONS = 3
EVALUATION = re.compile(r"(validation|test) loss at iteration (\d+) \| lm loss value: (\S+)")
FLAGS = ["--quant-type", "mxfp8", "--attention-dropout", 0.1, "--hidden-dropout", 0.1, "--train-iters", ITERATIONS]


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, board):
    """(run, capture) without and with evaluation after every iteration, under the same flags."""
    found = {}
    evaluate = ["--eval-interval", 1, "--eval-iters", 2]
    for name, flags in {"without": [], "with": [*evaluate, "--tensorboard-dir", board]}.items():
        directory = tmp_path_factory.mktemp(name)
        keep = ["--save-tensors", "--tensor-save-dir", directory, "--control-iter", 0]
        found[name] = pretrain(*FLAGS, *keep, *flags), open_capture(directory)
    return found


def test_training_repeats_every_digit(runs):
    (plain, _), (evaluated, _) = runs["without"], runs["with"]
    assert len(set(plain.losses)) == ITERATIONS
    for name in ("lm loss", "grad norm", "learning rate", "consumed samples"):
        assert values(evaluated, name) == values(plain, name), name


def test_evaluation_takes_place(runs):
    """After every iteration, and on test data at the end; what was due and what is shown at the end is one."""
    (plain, _), (evaluated, _) = runs["without"], runs["with"]
    assert not EVALUATION.findall(plain.output)
    found = EVALUATION.findall(evaluated.output)
    expected = [("validation", str(iteration)) for iteration in range(1, ITERATIONS + 1)]
    expected += [("test", str(ITERATIONS))]
    assert [(name, iteration) for name, iteration, _ in found] == expected
    losses = [float(loss) for _, _, loss in found]
    assert losses[ITERATIONS - 1] < losses[0]  # the weights are the trained ones


def test_nothing_of_an_evaluation_is_kept(runs):
    (_, plain), (_, evaluated) = runs["without"], runs["with"]
    assert not plain.problems + evaluated.problems
    assert Counter(map(content_of, evaluated.records)) == Counter(map(content_of, plain.records))
    assert evaluated.commits == plain.commits


def content_of(record):
    return record.iteration, record.micro_batch, record.module, record.operation, record.tensor_name, record.checksum


def test_tensorboard_has_the_numbers_of_the_lines(runs, board):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(board))
    events.Reload()
    run = runs["with"][0]
    for tag, name in {"lm loss": "lm loss", "learning-rate": "learning rate", "grad-norm": "grad norm"}.items():
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == iterations(run)
        printed = [float(value) for value in values(run, name)]
        assert [scalar.value for scalar in scalars] == pytest.approx(printed, rel=1e-3), tag
    evaluations = [float(loss) for name, _, loss in EVALUATION.findall(run.output) if name == "validation"]
    assert [scalar.value for scalar in events.Scalars("lm loss validation")] == pytest.approx(evaluations, rel=1e-5)
