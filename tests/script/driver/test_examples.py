"""The launch scripts of examples/llama: bad input is answered before anything starts; the CPU demo learns."""

import importlib.util
import os
import re
import shlex
import subprocess

import pytest

from megatron.training.arguments import parse_arguments
from script.driver.environment import ROOT

LLAMA = ROOT / "examples" / "llama"
LLAMA_1B = "train_llama32_1b_h100_fp8.sh"
SMALL = {
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "64",
    "FFN_HIDDEN_SIZE": "128",
    "NUM_ATTENTION_HEADS": "4",
    "NUM_QUERY_GROUPS": "2",
    "KV_CHANNELS": "16",
    "VOCAB_SIZE": "1024",
    "SEQ_LENGTH": "64",
    "GLOBAL_BATCH_SIZE": "2",
    "EVAL_ITERS": "1",
    "OMP_NUM_THREADS": "1",
}
MEGATRONS_LIST = ROOT / "tests" / "training" / "flags" / "llama3_8b_flags.txt"
needs_no_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="transformer-engine is installed"
)


def run(name, *argv, cwd, **environment):
    command = [str(LLAMA / name), *argv]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def printed_flags(cwd, *argv, **environment):
    """The flags of the trainer in the command that the launch script prints."""
    done = run(LLAMA_1B, *argv, cwd=cwd, DRY_RUN="1", **environment)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words[words.index(str(ROOT / "pretrain_gpt.py")) + 1 :]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        pytest.param(
            ["a", "b", "MOCK", "MOCK", "fp8"],
            "fp8 needs the package transformer-engine, which is not installed; allowed without it: bf16, fp16, fp32",
            marks=needs_no_engine,
        ),
        (["a", "b", "MOCK", "MOCK", "int8"], "unknown dtype int8; allowed: bf16, fp16, fp32, fp8"),
        (["a", "b", "nowhere"], "the tokenizer nowhere does not exist; allowed: a tokenizer.json"),
        (["a", "b", "MOCK", "corpus"], "the data corpus needs its tokenizer"),
        (["a", "b", "tokenizer.json", "nowhere"], "nowhere.bin and nowhere.idx do not both exist"),
    ],
)
def test_bad_input_is_one_line(tmp_path, argv, line):
    (tmp_path / "tokenizer.json").touch()
    done = run("train_llama32_1b_h100_fp8.sh", *argv, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"train_llama32_1b_h100_fp8\.sh: error: .*{line}.*\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_model_that_is_not_there(tmp_path):
    done = run("finetune_pretrained_demo.sh", "nowhere.gguf", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "finetune_pretrained_demo.sh: error: nowhere.gguf does not exist\n")


def losses(output):
    return [float(number) for number in re.findall(r"lm loss: (\S+)", output)]


@pytest.mark.slow
def test_the_cpu_demo_learns(tmp_path):
    directory = tmp_path / "work"  # beside the cache of this test
    directory.mkdir()
    done = run("train_llama_cpu_demo.sh", "--quant-type", "mxfp8", cwd=directory)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 20
    assert losses(done.stdout)[-1] < losses(done.stdout)[0] - 0.5
    assert list(directory.iterdir()) == []


class TestLlama1B:
    """The launch script in Megatron-LM's form."""

    @pytest.fixture
    def eight_ranks(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("RANK", "0")

    @pytest.mark.parametrize(("dtype", "expected"), [("bf16", (True, False)), ("fp16", (False, True))])
    def test_its_flags_are_ours(self, tmp_path, eight_ranks, dtype, expected):
        args = parse_arguments(printed_flags(tmp_path, "ckpt", "board", "MOCK", "MOCK", dtype))
        assert (args.bf16, args.fp16) == expected
        assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.kv_channels) == (16, 2048, 8192, 64)
        assert (args.num_attention_heads, args.num_query_groups, args.vocab_size) == (32, 8, 128256)
        assert args.lr_warmup_samples + args.lr_decay_samples == args.train_samples
        assert (args.save, args.load, args.tensorboard_dir) == ("ckpt", "ckpt", "board")
        assert not args.untie_embeddings_and_output_weights

    def test_it_has_every_flag_of_megatrons_example(self, tmp_path):
        lines = MEGATRONS_LIST.read_text(encoding="utf-8").splitlines()
        theirs = {line.split()[0] for line in lines if not line.startswith("#")}
        environment = {"TIE_EMBEDDINGS": "0", "PROFILE": "1"}
        ours = {word for word in printed_flags(tmp_path, **environment) if word.startswith("--")}
        of_fp8 = {flag for flag in theirs if flag.startswith("--fp8")}
        assert theirs - ours == of_fp8
        script = (LLAMA / LLAMA_1B).read_text(encoding="utf-8")
        assert all(flag in script for flag in of_fp8)

    def test_the_environment_sets_the_sizes(self, tmp_path, eight_ranks):
        environment = SMALL | {"TRAIN_ITERS": "1000", "TENSOR_PARALLEL": "2", "LR": "1e-3", "PROFILE": "1"}
        args = parse_arguments(printed_flags(tmp_path, **environment, PIPELINE_PARALLEL="2", NUM_WORKERS="3"))
        assert (args.num_layers, args.hidden_size, args.seq_length, args.global_batch_size) == (2, 64, 64, 2)
        assert (args.train_iters, args.lr_warmup_iters, args.lr_decay_iters) == (1000, 2, 998)
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
        assert (args.lr, args.decoupled_lr, args.num_workers, args.profile) == (1e-3, 1e-3, 3, True)

    def test_flags_of_the_caller_come_last(self, tmp_path, eight_ranks):
        args = parse_arguments(printed_flags(tmp_path, "ckpt", "--lr", "1e-3", "--quant-type", "mxfp8"))
        assert (args.lr, args.quant_type, args.save) == (1e-3, "mxfp8", "ckpt")

    def test_several_ranks_are_started_by_torchrun(self, tmp_path):
        done = run(LLAMA_1B, cwd=tmp_path, DRY_RUN="1", GPUS_PER_NODE="4", NUM_NODES="2", NODE_RANK="1")
        launcher = "-m torch.distributed.run --nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr localhost"
        assert launcher in done.stdout

    def test_a_few_steps_on_a_cpu(self, tmp_path):
        done = run(LLAMA_1B, "ckpt", "board", "MOCK", "MOCK", "fp32", cwd=tmp_path, TRAIN_SAMPLES="6", **SMALL)
        assert done.returncode == 0, done.stderr
        assert len(losses(done.stdout)) == 3
        assert all(6.5 < loss < 7.5 for loss in losses(done.stdout))  # ln 1024 = 6.93
        assert re.findall(r"(\w+) loss at iteration 3", done.stdout) == ["validation", "test"]
        assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "3"
        assert any((tmp_path / "board").iterdir())

    @pytest.mark.slow
    def test_it_saves_and_continues(self, tmp_path):
        argv = ["ckpt", "board", "MOCK", "MOCK", "bf16", "--quant-type", "mxfp8", "--override-opt-param-scheduler"]
        first = run(LLAMA_1B, *argv, cwd=tmp_path, TRAIN_ITERS="2", **SMALL)
        assert first.returncode == 0, first.stderr
        assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
        second = run(LLAMA_1B, *argv, cwd=tmp_path, TRAIN_ITERS="4", **SMALL)
        assert second.returncode == 0, second.stderr
        assert re.findall(r"iteration\s+(\d+)/", second.stdout) == ["3", "4"]
