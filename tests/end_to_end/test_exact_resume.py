"""A run that is killed between checkpoints and started again comes to what one came to that nobody killed.

Compared are the losses it reports, and every tensor of the checkpoint at its end: weights, float32 copies, moments and
random states, bit for bit.
"""

import re
import shutil
import signal

import pytest
import torch

from tests.end_to_end.conftest import MODEL_FLAGS, Run
from tests.training.log_lines import iterations, values

ITERATIONS, SAVED = 6, 3  # a run is killed after the fourth, so that it could not save again before it dies
KILLED_AFTER = "iteration        4/"
LATEST = "latest_checkpointed_iteration.txt"
# Dropout makes the losses depend on the random state, not on weights and samples alone.
FLAGS = ("--attention-dropout", 0.1, "--hidden-dropout", 0.1, "--train-iters", ITERATIONS, "--save-interval", SAVED)
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = (DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
TENSOR_2, PIPELINE_2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
INTERLEAVED = ("--num-layers", 4, "--num-layers-per-virtual-pipeline-stage", 1)
EXPERTS_2 = ("--expert-model-parallel-size", 2, "--num-experts", 4, "--moe-router-topk", 2)
# The first steps are left out and the loss scale is halved, later it is doubled again.
SCALED = ("--fp16", "--loss-scale-window", 2, "--hysteresis", 1, "--initial-loss-scale")
# Name -> (ranks, flags)
RUNS = {
    "plain": (1, ()),
    "plain bf16 DP 2": (2, ("--bf16",)),
    "distributed": (1, (DISTRIBUTED,)),
    "distributed DP 2": (2, (DISTRIBUTED,)),
    "overlap": (2, OVERLAP),
    "fully reshardable bf16": (2, (*OVERLAP, "--bf16", "--dist-ckpt-optim-fully-reshardable")),
    "tensor parallel": (2, (DISTRIBUTED, *TENSOR_2, "--sequence-parallel")),
    "tensor parallel bf16": (2, (DISTRIBUTED, *TENSOR_2, "--bf16")),
    "pipeline": (2, (DISTRIBUTED, *PIPELINE_2)),
    "interleaved pipeline": (2, (DISTRIBUTED, *PIPELINE_2, *INTERLEAVED)),
    "context parallel": (2, (DISTRIBUTED, "--context-parallel-size", 2)),
    "expert parallel": (2, (DISTRIBUTED, *EXPERTS_2)),
    "expert parallel fully reshardable": (2, (DISTRIBUTED, *EXPERTS_2, "--dist-ckpt-optim-fully-reshardable")),
    "TP 2 x PP 2": (4, (*OVERLAP, *TENSOR_2, *PIPELINE_2)),
    "fp16, no step done": (1, (*SCALED, 2**22)),
    "fp16, no step done, distributed": (2, (DISTRIBUTED, *SCALED, 2**22)),
    "fp16 distributed": (2, (DISTRIBUTED, *SCALED, 2**21)),
    "decoupled learning rate": (2, (DISTRIBUTED, *PIPELINE_2, "--decoupled-lr", 5e-4)),
    "decoupled learning rate, plain": (1, ("--bf16", "--decoupled-lr", 5e-4)),
    "stochastic gradient descent": (1, ("--optimizer", "sgd")),
    "per token loss": (2, (DISTRIBUTED, "--calculate-per-token-loss")),
    "rampup": (1, (DISTRIBUTED, "--train-iters", "", "--train-samples", 14, "--rampup-batch-size", 1, 1, 4)),
    "constant structure": (2, (DISTRIBUTED, "--ckpt-assume-constant-structure")),
    "first rank alone writes": (2, (DISTRIBUTED, "--no-ckpt-fully-parallel-save")),
    "asynchronous": (2, (*OVERLAP, "--bf16", "--async-save", "--save-interval", 1)),
}
FAST = ("fully reshardable bf16",)
MATRIX = pytest.mark.matrix


def tensors_of(checkpoint):
    """Every tensor of a checkpoint and its plain objects, by name."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_plain_tensors(str(checkpoint))


def command_line(flags, directory):
    """All flags of a run that saves into `directory`; an empty value takes its flag away."""
    words = [*MODEL_FLAGS, *map(str, (*FLAGS, *flags)), "--save", str(directory)]
    while "" in words:
        flag = words[words.index("") - 1]
        words = [word for index, word in enumerate(words) if flag not in (word, words[index - 1])]
    return words


def latest(directory):
    return sorted(directory.glob("iter_*"))[-1]


@pytest.mark.usefixtures("reads_checkpoints")
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=MATRIX) for name in RUNS])
def test_killed_between_checkpoints_and_resumed(trainer, tmp_path, name):
    ranks, flags = RUNS[name]
    whole = Run(*trained(trainer, command_line(flags, tmp_path / "whole"), ranks))
    words = command_line(flags, tmp_path / "killed")
    codes, output = trainer.launch(*words, ranks=ranks, after=KILLED_AFTER, send=signal.SIGKILL)
    assert codes == [-signal.SIGKILL] * ranks, output[-4000:]
    saved = int((tmp_path / "killed" / LATEST).read_text())
    assert saved < SAVED + 2 if name == "asynchronous" else saved == SAVED, "it was killed between two checkpoints"
    resumed = Run(*trained(trainer, [*words, "--load", tmp_path / "killed"], ranks))
    assert f"iter_{saved:07d}: weights, optimizer and schedules, random state" in resumed.output
    assert iterations(resumed) == iterations(whole)[saved:]
    assert resumed.losses == whole.losses[saved:]
    for reported in ("grad norm", "learning rate", "consumed samples", "loss scale"):
        again = values(resumed, reported)
        assert again == values(whole, reported)[-len(again) :], reported
    assert_equal(latest(tmp_path / "whole"), latest(tmp_path / "killed"))
    assert not list((tmp_path / "killed").glob(".iter*")), "what the killed run left is removed"


def test_killed_while_a_checkpoint_is_written_in_the_background(trainer, tmp_path):
    flags = (*OVERLAP, "--async-save", "--save-interval", 2)
    whole = Run(*trained(trainer, command_line(flags, tmp_path / "whole"), 2))
    words = command_line(flags, tmp_path / "killed")
    _, output = trainer.launch(*words, ranks=2, after="writing checkpoint 4 to", send=signal.SIGKILL)
    assert "saved checkpoint of iteration 4" not in output
    assert (tmp_path / "killed" / LATEST).read_text() == "2"
    resumed = Run(*trained(trainer, [*words, "--load", tmp_path / "killed"], 2))
    assert resumed.losses == whole.losses[2:]
    assert (tmp_path / "killed" / LATEST).read_text() == str(ITERATIONS)
    assert sorted(path.name for path in (tmp_path / "killed").glob("*iter_*")) == [
        f"iter_{iteration:07d}" for iteration in (2, 4, 6)
    ]


GROUPS = ("--num-experts", 8, "--moe-router-topk", 2, "--moe-router-score-function", "sigmoid")
ROUTED = (*GROUPS, "--moe-router-num-groups", 4, "--moe-router-group-topk", 2, "--moe-router-enable-expert-bias")


def test_model_flags_from_the_checkpoint_are_those_of_the_command_line(trainer, tmp_path):
    trained(trainer, [*MODEL_FLAGS, *ROUTED, "--train-iters", 1, "--save", tmp_path], 1)
    goes_on = (*MODEL_FLAGS, "--override-opt-param-scheduler", "--load", tmp_path)
    _, given = trained(trainer, [*goes_on, *ROUTED], 1)
    _, stored = trained(trainer, [*goes_on, "--use-checkpoint-args"], 1)
    assert given == stored
    codes, output = trainer.launch(*goes_on, *GROUPS)
    assert codes == [2]
    assert "another model: moe_router_num_groups is 4 there and None here; --use-checkpoint-args" in output


TRAITS = {
    "bf16": (("--bf16",), "precision: fp32 there and bf16 here"),
    "fp16": (("--fp16",), "precision: fp32 there and fp16 here"),
    "sgd": (("--optimizer", "sgd"), "optimizer: adam there and sgd here"),
    "decoupled learning rate": (("--decoupled-lr", 5e-4), "--decoupled-lr: not given there and given here"),
}


@pytest.fixture(scope="module")
def plain_fp32(trainer, tmp_path_factory):
    """A checkpoint after one iteration."""
    directory = tmp_path_factory.mktemp("fp32")
    trained(trainer, [*MODEL_FLAGS, "--train-iters", 1, "--save", directory], 1)
    return directory


@pytest.mark.parametrize("name", TRAITS)
def test_the_state_of_another_optimizer_is_refused_in_one_line(trainer, plain_fp32, name):
    flags, complaint = TRAITS[name]
    goes_on = (*MODEL_FLAGS, *flags, "--load", plain_fp32)
    codes, output = trainer.launch(*goes_on)
    assert codes == [2]
    (line,) = [line for line in output.splitlines() if "error" in line]
    assert complaint in line
    assert "--no-load-optim takes weights and progress without it" in line
    alone = trainer.run(*goes_on, "--no-load-optim")
    assert "moments and schedules, of the learning rate too, start anew\n" in alone
    assert iterations(Run(alone, [])) == [2, 3]


@pytest.mark.parametrize(("file", "share"), [("__0_0.distcp", 0.5), ("__0_0.distcp", 0.999), ("metadata.json", 0.5)])
def test_a_file_that_was_cut_off_is_called_damaged(trainer, plain_fp32, tmp_path, file, share):
    shutil.copytree(plain_fp32, tmp_path / "damaged")
    path = latest(tmp_path / "damaged") / file
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    codes, output = trainer.launch(*MODEL_FLAGS, "--load", tmp_path / "damaged")
    assert codes == [1]
    (line,) = [line for line in output.splitlines() if "error: " in line]
    assert f"{path.parent}: a file is incomplete or damaged: " in line


def trained(trainer, words, ranks):
    output = trainer.run(*words, ranks=ranks)
    return output, re.findall(r"lm loss: (\S+)", output)


def assert_equal(one, other):
    """Two checkpoints have the same tensors."""
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys()
    tensors = [name for name in left if torch.is_tensor(left[name])]
    assert any("exp_avg_sq" in name or "momentum" in name for name in tensors)
    assert [name for name in tensors if not torch.equal(left[name], right[name])] == []
