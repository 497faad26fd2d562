"""What a user gets wrong, and what a disk does: one line, the right exit code, and nothing lost."""

import pytest

from megatron.quantscope.capture import open_capture
from tests.end_to_end.conftest import launch

SPENT_BUDGET_GB = 0.0004  # less than one iteration of the small model

USAGE = [
    (["--quant-typ", "mxfp8"], "--quant-typ"),
    (["--quant-type", "int3"], "int3"),
    (["--control-iter", "-1"], "whole number >= 0"),
    (["--control-iter", "two"], "whole number >= 0"),
    (["--tensor-dry-run", "--tensor-check-interference"], "exclude each other"),
    (["--fp8-format", "hybrid"], "--fp8-format"),
    (["--tensor-model-parallel-size", "2"], "world size 1"),
    (["--data-path", "/nowhere/corpus"], "/nowhere/corpus"),
    (["--load", "/nowhere/checkpoint", "--exit-on-missing-checkpoint"], "/nowhere/checkpoint"),
]


@pytest.mark.parametrize(("flags", "named"), USAGE, ids=[" ".join(flags) for flags, _ in USAGE])
def test_wrong_usage_is_one_line_and_names_the_thing(flags, named):
    result = launch(*flags)
    lines = result.stderr.strip().splitlines()
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert named in lines[-1]
    assert len([line for line in lines if "error" in line]) == 1


@pytest.mark.parametrize(("on_error", "exit_code", "iterations"), [("continue", 0, 3), ("stop", 1, 1)])
def test_a_spent_budget_ends_collecting_and_what_was_kept_is_readable(tmp_path, on_error, exit_code, iterations):
    flags = ["--save-tensors", "--tensor-save-dir", tmp_path, "--control-iter", 3, "--quant-type", "mxfp8"]
    result = launch(*flags, "--tensor-budget-gb", SPENT_BUDGET_GB, "--tensor-on-error", on_error)
    assert result.returncode == exit_code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.count("lm loss:") <= iterations
    assert "budget" in result.stderr + result.stdout
    capture = open_capture(tmp_path)
    assert capture.records
    assert sum(record.path.stat().st_size for record in capture.records) <= SPENT_BUDGET_GB * 1e9
    for record in capture.records:
        assert list(capture.load(record).shape) == list(record.shape)


def test_an_unwritable_directory_is_named(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("here first")
    result = launch("--save-tensors", "--tensor-save-dir", blocker / "capture", "--quant-type", "mxfp8")
    assert result.returncode == 1
    assert str(blocker) in result.stderr.strip().splitlines()[-1]
    assert blocker.read_text() == "here first"
