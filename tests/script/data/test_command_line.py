"""One line for what the user can act on, the right exit code, and nothing heavy before it."""

import argparse
import logging
import subprocess
import sys
import warnings

import pytest

from megatron.training.failure import TrainingError, UsageError
from script.data import command_line
from script.data.command_line import InputError, run

PROGRAMS = (
    "script.data.fetch",
    "script.data.prepare_corpus",
    "script.model.import_checkpoint",
    "script.model.export_checkpoint",
    "script.model.evaluate_loss",
)


@pytest.mark.parametrize("module", PROGRAMS)
def test_help_imports_nothing_heavy(module):
    code = f"""
import sys
from {module} import main
try:
    main(["--help"])
except SystemExit as exit_:
    assert exit_.code == 0
heavy = {{"torch", "numpy", "megatron.core", "gguf", "tokenizers", "safetensors", "tiktoken", "xxhash"}}
sys.exit(str(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
    assert f"usage: python -m {module}" in done.stdout


@pytest.mark.parametrize("error", [InputError("a b"), UsageError("a b"), TrainingError("a b"), OSError("a b")])
def test_a_failure_is_one_line(capsys, error):
    def program():
        raise error

    assert run(program, "name") == 1
    assert capsys.readouterr().err == "name: error: a b\n"


def test_interruption(capsys):
    def program():
        raise KeyboardInterrupt

    assert run(program, "name") == 130
    assert capsys.readouterr().err == "name: stopped\n"


def test_a_mistake_of_our_own_is_not_hidden():
    def program():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(program, "name")


def test_only_our_own_messages_are_shown(capsys):
    def program():
        logging.getLogger("script.data.fetch").info("ours")
        logging.getLogger("megatron.core").info("theirs")
        warnings.warn_explicit("theirs", UserWarning, "x.py", 1, module="megatron.core.optimizer")

    for _ in range(2):  # a second run shows them once, too
        assert run(program, "name") == 0
        assert capsys.readouterr().err == "ours\n"


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (command_line.positive_int, {"1": 1, "20": 20}, ["0", "-1", "1.5", "x", ""]),
        (command_line.non_negative_int, {"0": 0, "7": 7}, ["-1", "1.5", "x", ""]),
    ],
)
def test_numbers(parse, good, bad):
    assert {text: parse(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from"):
            parse(text)
