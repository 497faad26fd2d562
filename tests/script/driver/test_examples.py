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
STAND_IN_PYTHON = """#!/usr/bin/env bash
# Notes its arguments in `called`; makes a directory, or an index beside `tokens/`, of what follows --output.
echo "$*" >>called
while (($# > 1)); do
    if [[ "$1" == --output ]]; then
        if [[ "$2" == */tokens/* ]]; then touch "$2.idx"; else mkdir "$2"; fi
    fi
    shift
done
"""
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


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("TRAIN_ITERS", "abc", "a whole number from 1"),
        ("TRAIN_SAMPLES", "1e4", "a whole number from 1"),
        ("NUM_NODES", "two", "a whole number from 1"),
        ("GPUS_PER_NODE", "0", "a whole number from 1"),
        ("LR_WARMUP_ITERS", "-1", "a whole number"),
        ("LR", "fast", "a number"),
        ("PROFILE", "yes", "0 and 1"),
        ("TRAIN_ITERS", "a[$(touch ran)]", "a whole number from 1"),
    ],
)
def test_a_number_that_is_none(tmp_path, name, value, allowed):
    done = run(LLAMA_1B, cwd=tmp_path, DRY_RUN="1", **{name: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{LLAMA_1B}: error: {name} is {value}; allowed: {allowed}\n"
    assert list(tmp_path.iterdir()) == []


def test_every_number_of_the_environment_is_checked():
    """Names in capitals that the script takes a value from, but for the one that names a path and those with words."""
    script = (LLAMA / LLAMA_1B).read_text(encoding="utf-8")
    taken = set(re.findall(r"\$\{([A-Z][A-Z_]+):?-", script)) | set(re.findall(r"\$\(\(([A-Z][A-Z_]+)", script))
    checked = {word for part in re.findall(r"^allow (.*?[^\\])$", script, re.M | re.S) for word in part.split()}
    assert taken - checked == {
        "ATTENTION_BACKEND",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "DATA_CACHE_PATH",
        "MASTER_ADDR",
    }


def test_the_number_of_processes_of_the_cpu_demo(tmp_path):
    done = run("train_llama_cpu_demo.sh", cwd=tmp_path, PROCESSES="a[$(touch ran)]")
    said = "train_llama_cpu_demo.sh: error: PROCESSES is a[$(touch ran)]; allowed: a whole number from 1\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


class TestSources:
    """What the fine-tuning script made, it takes again for the same source only. What it calls is a stand-in."""

    @pytest.fixture
    def tune(self, tmp_path):
        """`tune(model, text)` -> the finished script, in a checkout whose Python notes its arguments in `called`."""
        script = tmp_path / "checkout" / "examples" / "llama" / "finetune_pretrained_demo.sh"
        setup = tmp_path / "checkout" / "script" / "setup_env.sh"
        python = tmp_path / "python"
        for path, text in (
            (script, (LLAMA / script.name).read_text(encoding="utf-8")),
            (setup, f"#!/bin/sh\necho {python}\n"),
            (python, STAND_IN_PYTHON),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)

        def start(model, text="text.txt"):
            return subprocess.run([script, model, text], cwd=tmp_path, capture_output=True, text=True, check=False)

        (tmp_path / "text.txt").touch()
        return start

    def made(self, tmp_path):
        lines = (tmp_path / "called").read_text(encoding="utf-8").splitlines()
        return [line.split()[-1] for line in lines if "--output" in line]

    def test_a_version_in_a_name_is_no_suffix(self, tmp_path, tune):
        for name in ("Llama-3.2-1B", "Llama-3.1-8B"):
            (tmp_path / name).mkdir()
            assert tune(name).returncode == 0
        assert self.made(tmp_path) == [
            "checkpoints/Llama-3.2-1B",
            "checkpoints/Llama-3.2-1B/tokens/text",
            "checkpoints/Llama-3.1-8B",
            "checkpoints/Llama-3.1-8B/tokens/text",
        ]

    def test_the_same_source_is_made_once(self, tmp_path, tune):
        (tmp_path / "model.gguf").touch()
        assert [tune("model.gguf").returncode, tune("./model.gguf").returncode] == [0, 0]
        assert self.made(tmp_path) == ["checkpoints/model", "checkpoints/model/tokens/text"]

    @pytest.mark.parametrize("kind", ["model", "text"])
    def test_another_source_of_that_name_is_refused(self, tmp_path, tune, kind):
        for directory in ("one", "two"):
            (tmp_path / directory).mkdir()
            (tmp_path / directory / "same").touch()
        argv = [("one/same", "text.txt"), ("two/same", "text.txt")]
        if kind == "text":
            (tmp_path / "same.gguf").touch()
            argv = [("same.gguf", "one/same"), ("same.gguf", "two/same")]
        assert tune(*argv[0]).returncode == 0
        before = self.made(tmp_path)
        done = tune(*argv[1])
        made = "checkpoints/same" if kind == "model" else "checkpoints/same/tokens/same"
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"finetune_pretrained_demo.sh: error: {made} is there, and {made}.source says {tmp_path}/one/same, not "
            f"{tmp_path}/two/same; remove both, or give two/same another name\n"
        )
        assert self.made(tmp_path) == before

    def test_what_says_nothing_of_its_source_is_refused(self, tmp_path, tune):
        (tmp_path / "model.gguf").touch()
        (tmp_path / "checkpoints" / "model").mkdir(parents=True)
        done = tune("model.gguf")
        assert done.returncode == 2
        assert "checkpoints/model.source says nothing of its source, not" in done.stderr


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

    @pytest.mark.parametrize(("given", "expected"), [("1e-5", 1e-6), ("", 3e-5)])
    def test_the_lowest_rate_is_a_tenth_of_the_highest(self, tmp_path, eight_ranks, given, expected):
        args = parse_arguments(printed_flags(tmp_path, LR=given))
        assert (args.min_lr, args.decoupled_min_lr) == (pytest.approx(expected), pytest.approx(expected))

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
