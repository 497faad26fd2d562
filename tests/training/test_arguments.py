"""The command line as the user meets it: unknown flags, suggestions, quotes, and the answer to --help."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.arguments import arguments_with, parse_arguments
from megatron.training.failure import UsageError
from megatron.training.flags import FLAG_GROUPS
from megatron.training.main import main

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
HEAVY = {"torch", "numpy", "pandas", "matplotlib", "transformers", "megatron.core"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--hiden-size", "64"], "unknown flag --hiden-size; did you mean --hidden-size?"),
        (["--hiden-size=64"], "unknown flag --hiden-size; did you mean --hidden-size?"),
        (["--num-lay", "2"], "unknown flag --num-lay; did you mean --num-layers?"),
        (["--xyzzy"], "unknown flag --xyzzy; --help lists all flags"),
        (["stray"], "'stray' belongs to no flag; --help lists all flags"),
    ],
)
def test_unknown_words_are_refused_by_name(command, capsys, words, line):
    assert main(words + command()) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"pretrain_gpt.py: error: {line}\n")


def test_every_unknown_flag_is_named_at_once(command, capsys):
    assert main([*command(), "--first-unknown", "--second-unknown", "3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("; ")[0] for line in lines] == [
        "pretrain_gpt.py: error: unknown flag --first-unknown",
        "pretrain_gpt.py: error: unknown flag --second-unknown",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, ["--num-layers", "'0'", ">= 1"]),
        ({"lr": "fast"}, ["--lr", "'fast'", ">= 0"]),
        ({"normalization": "BatchNorm"}, ["--normalization", "'BatchNorm'", "LayerNorm", "RMSNorm"]),
        ({"quant_type": "mxfp9"}, ["--quant-type", "'mxfp9'", "mxfp8", "nvfp4"]),
    ],
)
def test_wrong_value_is_one_line_with_the_flag_the_value_and_what_is_allowed(command, capsys, changes, said):
    assert main(command(**changes)) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert all(part in err for part in said)


def test_split_loses_the_quotes_of_launch_scripts(command, tmp_path):
    prefix = tmp_path / "data"
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).touch()
    args = parse_arguments(command(mock_data=None, data_path=prefix, split="'99,1,0'"))
    assert args.split == "99,1,0"


def answer_and_imports(flag):
    words = [sys.executable, "-X", "importtime", str(PROGRAM), flag]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    told = [line for line in answer.stderr.splitlines() if line.startswith("import time:")]
    return answer, {line.rpartition("|")[2].strip() for line in told}


def test_help_names_every_flag_without_importing_anything_heavy():
    answer, imported = answer_and_imports("--help")
    assert answer.returncode == 0
    assert "megatron.training.arguments" in imported
    assert not imported & HEAVY
    for group in FLAG_GROUPS:
        assert f"\n{group.title}:\n" in answer.stdout
        for flag in group.flags:
            assert f"\n  {flag.name}" in answer.stdout


def test_a_wrong_flag_is_answered_without_importing_anything_heavy():
    answer, imported = answer_and_imports("--xyzzy")
    assert answer.returncode == 2
    assert "pretrain_gpt.py: error: unknown flag --xyzzy" in answer.stderr
    assert not imported & HEAVY


def test_arguments_of_a_model_that_is_not_trained():
    args = arguments_with(num_layers=1, hidden_size=96, num_attention_heads=6, seq_length=8, vocab_size=1000)
    assert (args.kv_channels, args.num_query_groups, args.ffn_hidden_size) == (16, 6, 384)
    assert (args.max_position_embeddings, args.padded_vocab_size) == (8, 1024)


def test_arguments_of_a_model_refuse_a_name_that_is_no_flag():
    with pytest.raises(UsageError, match="hidden_sise"):
        arguments_with(num_layers=1, hidden_sise=96)
