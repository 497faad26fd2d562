"""The launch scripts of examples/llama: bad input is answered before anything starts; the CPU demo learns."""

import os
import re
import subprocess

import pytest

from script.driver.environment import ROOT

LLAMA = ROOT / "examples" / "llama"


def run(name, *argv, cwd):
    command = [str(LLAMA / name), *argv]
    return subprocess.run(command, cwd=cwd, env=dict(os.environ), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["a", "b", "MOCK", "MOCK", "fp8"], "fp8 needs TransformerEngine, .*allowed: bf16, fp16, fp32"),
        (["a", "b", "MOCK", "MOCK", "int8"], "unknown dtype int8; allowed: bf16, fp16, fp32"),
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
    done = run("train_llama_cpu_demo.sh", "--quant-type", "mxfp8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 20
    assert losses(done.stdout)[-1] < losses(done.stdout)[0] - 0.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_launch_script_saves_and_continues(tmp_path):
    small = ["--num-layers", "1", "--hidden-size", "256", "--num-attention-heads", "4", "--num-query-groups", "2"]
    small += ["--ffn-hidden-size", "256", "--vocab-size", "1024", "--seq-length", "64", "--global-batch-size", "1"]
    argv = ["ckpt", "scalars", "MOCK", "MOCK", "fp32", *small, "--quant-type", "mxfp8", "--train-iters"]
    first = run("train_llama32_1b_h100_fp8.sh", *argv, "2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert any((tmp_path / "scalars").iterdir())
    second = run("train_llama32_1b_h100_fp8.sh", *argv, "4", "--override-opt-param-scheduler", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert re.findall(r"iteration\s+(\d+)/", second.stdout) == ["3", "4"]
