"""Wrong quantisation flags are answered by the trainer's parser, in one line and before torch is imported."""

import pytest

from megatron.training.main import main

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 1 "
SIZES += "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("CUSTOM_QUANT_TYPE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far.yaml").write_text("rules:\n  - {layers: 2, format: mxfp8}\n")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--quant-preset mx", "argument --quant-preset: invalid choice: 'mx' (choose from 'ocp', 'te-mxfp8', "),
        ("--quant-recipe none.yaml", "--quant-recipe: can not read none.yaml: No such file or directory\n"),
        ("--quant-recipe far.yaml", "far.yaml:2: layers 2 is not allowed: the model has layers 0-1 (or -2--1, from"),
        (
            "--quant-recipe far.yaml --quant-type mxfp8",
            "--quant-recipe far.yaml says what is quantised how: leave out --quant-type, or the recipe\n",
        ),
        (
            "--quant-type mxfp8 --quant-skip-first-layers 5",
            "--quant-skip-first-layers 5 and --quant-skip-last-layers 0 leave none of 2 layers to quantise\n",
        ),
        (
            "--quant-preset te-mxfp8 --quant-type none",
            "--quant-type none leaves nothing of --quant-preset te-mxfp8: leave one of them out\n",
        ),
        ("--quant-backward-type mxfp8", "--quant-backward-type mxfp8 needs a --quant-type other than none\n"),
    ],
)
def test_one_line_and_exit_code_2(capsys, flags, line):
    assert main([*SIZES.split(), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pretrain_gpt.py: error: {line}")
    assert error.count("\n") == 1
