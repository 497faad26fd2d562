"""Training goes on from a snapshot as it went on from the state itself: to the bit, as often as one likes."""

import pytest

from megatron.training import main as command_line
from megatron.training import training
from megatron.training.data.batches import micro_batches
from megatron.training.loop import iterate
from megatron.training.rehearsal.state_snapshot import StateSnapshot
from megatron.training.rehearsal.step_trace import gradient_prints, trace
from megatron.training.steps import ForwardStep

BEFORE, AFTER = 2, 4  # steps; of the first, so that there are moments to put back
RUNS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "sgd with momentum": {"bf16": True, "optimizer": "sgd", "sgd_momentum": 0.9},
    "a loss scale that moves": {"fp16": True, "initial_loss_scale": 2**21, "loss_scale_window": 2, "hysteresis": 1},
    "distributed optimizer": {"bf16": True, "use_distributed_optimizer": True},
    "a growing batch": {"train_iters": None, "train_samples": 40, "rampup_batch_size": [1, 1, 8]},
}


def steps_of(run, count):
    """Everything that `count` further steps come to, with the loss scale and the rates they were made at."""
    state = run.state
    data = micro_batches(run.args, run.datasets.train, consumed=state.progress.consumed_train_samples)
    traces = []
    for _ in range(count):
        step, report = iterate(run, data, ForwardStep())
        prints = trace(step, gradient_prints(state.model), state.model).prints
        traces.append((prints, report.loss_scale, report.learning_rate, report.consumed_samples))
    return traces


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS.keys())
def test_the_same_steps_again(command, monkeypatch, flags):
    """Dropout on, so that the random state counts."""

    def train(run):
        steps_of(run, BEFORE)
        snapshot = StateSnapshot(run.state)
        passes = []
        for _ in range(3):
            passes.append(steps_of(run, AFTER))
            last = run.state.progress.iteration
            snapshot.restore()
        assert last == BEFORE + AFTER
        assert run.state.progress.iteration == BEFORE
        assert passes[0] == passes[1] == passes[2]
        prints = [step[0] for step in passes[0]]
        assert prints[0] != prints[1] != prints[2]
        done.append(True)
        return False

    done = []
    monkeypatch.setattr(training, "train", train)
    common = {"train_iters": 8, "global_batch_size": 4, "eval_iters": 0, "quant_type": "none"}
    common |= {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    assert command_line.main(command(**common | flags)) == 0
    assert done


def test_without_a_snapshot_the_steps_differ(command, monkeypatch):
    """What the test above compares is not the same for any two runs of steps."""

    def train(run):
        found.extend(steps_of(run, 2))
        return False

    found = []
    monkeypatch.setattr(training, "train", train)
    for _ in range(2):
        assert command_line.main(command(quant_type="none", seed=len(found) + 1)) == 0
    assert found[:2] != found[2:]
