"""Whole training runs of a small Llama through pretrain_gpt.py, each in processes of its own."""

import contextlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.quantscope.capture import open_capture
from tests.end_to_end.forked_ranks import ForkedTrainer

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
LAYERS, HIDDEN, HEADS, GROUPS, FFN, SEQUENCE = 2, 64, 4, 2, 96, 64
VOCABULARY = 255  # the null tokenizer adds one: 256 needs no padding at any tensor-parallel size up to 2

MODEL_FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} "
    f"--group-query-attention --num-query-groups {GROUPS} --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 3 --lr 1e-3 --min-lr 1e-4 --eval-iters 0 --log-interval 1 --seed 7"
).split()


@dataclass(frozen=True)
class Run:
    """What one training run printed, and its loss at every iteration, as text to compare exactly."""

    output: str
    losses: list[str]


def launch(*flags: object, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Train the small model, however it ends."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    model = [flag for flag in MODEL_FLAGS if flag != "--mock-data" or "--data-path" not in flags]
    command = [*(launcher if ranks > 1 else [sys.executable]), str(ROOT / "pretrain_gpt.py"), *model]
    return subprocess.run(
        [*command, *map(str, flags)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def pretrain(*flags: object, ranks: int = 1, **environment: str) -> Run:
    """Train the small model; fails the test with the run's own output when the run fails."""
    result = launch(*flags, ranks=ranks, **environment)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-4000:]
    return Run(output, _losses(result.stdout))


def _losses(output: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", output)


@pytest.fixture(scope="session")
def captured(tmp_path_factory):
    """`captured("mxfp8", *flags)` -> (capture, records): one run a combination, shared by the tests of a worker."""
    runs = {}

    def run(quant_type: str, *flags: object):
        key = (quant_type, *map(str, flags))
        if key not in runs:
            directory = tmp_path_factory.mktemp("capture")
            pretrain("--save-tensors", "--tensor-save-dir", directory, "--quant-type", quant_type, *flags)
            runs[key] = open_capture(directory)
        return runs[key]

    return run


@pytest.fixture(scope="session")
def trainer():
    """One process that runs are forked from: quicker where there are many."""
    with ForkedTrainer() as trainer:
        yield trainer


@pytest.fixture(scope="session")
def train(trainer):
    """`train(*flags, ranks=1)` -> Run, as `pretrain` but by forked processes."""

    def run(*flags: object, ranks: int = 1) -> Run:
        output = trainer.run(*MODEL_FLAGS, *flags, ranks=ranks)
        return Run(output, _losses(output))

    return run


@pytest.fixture(scope="module")
def reads_checkpoints():
    """A process group for reading checkpoints."""
    import torch.distributed as dist

    from megatron.core import parallel_state

    with contextlib.ExitStack() as left:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            left.callback(dist.destroy_process_group)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
            left.callback(parallel_state.destroy_model_parallel)
        yield
