"""The command, run as users run it where that matters, else in this process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from script.visualization import tensor_visualizer
from tests.quantscope.analysis.captures import write_capture

NO_COMPILER = "no C++ kernels, formats run on the slower torch backend: "
PROGRAM = Path(tensor_visualizer.__file__)
HELP_WITHOUT = """
import runpy, sys
sys.argv = ["x", "--help"]
try:
    runpy.run_path({program!r}, run_name="__main__")
except SystemExit:
    pass
assert not {{"torch", "pandas", "numpy", "matplotlib"}} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    return write_capture(tmp_path_factory.mktemp("capture"), layers=1)


def run(*arguments, cwd="/"):
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def assert_one_line(done, code, *expected):
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    for text in expected:
        assert text in done.stderr


def test_help_answers_at_once():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert "--tensor_dir" in run("--help").stdout
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


def test_help_imports_nothing_heavy():
    code = HELP_WITHOUT.format(program=str(PROGRAM))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_run_as_a_file_from_any_directory_with_hyphens_and_workers(capture, tmp_path):
    done = run("--tensor-dir", capture, "--output-dir", "out", "--max-workers", 2, "--quick", cwd=tmp_path)
    assert (done.returncode, without_warning(done.stderr)) == (0, "")
    assert done.stdout.splitlines()[0].startswith("32 tensors of ")
    assert done.stdout.splitlines()[-1] == "out/quick_analysis.png"
    assert (tmp_path / "out" / "quick_analysis.png").is_file()


def test_directories_without_a_capture(tmp_path):
    done = run("--tensor_dir", tmp_path / "nowhere", "--output_dir", tmp_path / "out")
    assert_one_line(done, 2, "no such directory", str(tmp_path / "nowhere"))
    for name, content in (("empty", None), ("foreign", "notes.txt"), ("odd", "notes.pt")):
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / content).write_text("not a tensor")
        assert_one_line(run("--tensor_dir", tmp_path / name, "--output_dir", tmp_path / "out"), 2, "no captures")
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_there(capture, tmp_path, capsys):
    code = tensor_visualizer.main(["--tensor_dir", str(capture), "--output_dir", str(tmp_path), "--run", "nothing"])
    assert code == 2
    assert "no run nothing" in capsys.readouterr().err


def test_an_output_that_is_a_file(capture, tmp_path, capsys):
    (tmp_path / "out").write_text("what was there")
    code = tensor_visualizer.main(["--tensor_dir", str(capture), "--output_dir", str(tmp_path / "out"), "--quick"])
    captured = capsys.readouterr()
    assert (code, captured.out) == (1, "")
    assert captured.err.startswith("tensor_visualizer.py: can not write ")
    assert captured.err.count("\n") == 1
    assert (tmp_path / "out").read_text() == "what was there"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max_workers", "0"], "'0' is not allowed: give a whole number >= 1"),
        (["--max_workers", "many"], "'many' is not allowed"),
        (["--only", "everything"], "invalid choice: 'everything'"),
        (["--quick", "--only", "statistics"], "not allowed with argument"),
        (["--tensor-directory", "x"], "unrecognized arguments"),
    ],
)
def test_wrong_usage(capture, tmp_path, arguments, expected, capsys):
    with pytest.raises(SystemExit) as error:
        tensor_visualizer.main(["--tensor_dir", str(capture), "--output_dir", str(tmp_path), *arguments])
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


def test_required_options_are_asked_for(capsys):
    with pytest.raises(SystemExit) as error:
        tensor_visualizer.main([])
    assert error.value.code == 2
    assert "--tensor_dir" in capsys.readouterr().err


def test_damaged_files_are_said_in_one_line_and_in_the_exit_code(tmp_path, capsys):
    directory = write_capture(tmp_path / "in", layers=1)
    first = min((directory / "mxfp8").glob("*.pt"))
    first.write_bytes(first.read_bytes()[:500])
    out = str(tmp_path / "out")
    code = tensor_visualizer.main(
        ["--tensor_dir", str(directory), "--output_dir", out, "--quick", "--max_workers", "1"]
    )
    captured = capsys.readouterr()
    assert code == 1
    assert captured.err.count("\n") == 1
    assert first.name in captured.err
    assert "tensor_stats.txt" in captured.err
    assert Path(captured.out.splitlines()[-1]).is_file()


def without_warning(errors: str) -> str:
    """Less the one line that a machine without a C++ compiler gets."""
    lines = errors.splitlines(keepends=True)
    assert sum(line.startswith(NO_COMPILER) for line in lines) <= 1
    return "".join(line for line in lines if not line.startswith(NO_COMPILER))


def listens_to_interrupts() -> None:
    """A shell's background job, which the tests may be, ignores them, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupt_leaves_one_line_and_no_process(capture, tmp_path):
    command = [sys.executable, str(PROGRAM), "--tensor_dir", str(capture), "--output_dir", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, "--max_workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listens_to_interrupts,
    )
    while not (tmp_path / "out" / "summary.parquet").exists():  # the figures come next
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert without_warning(errors) == "tensor_visualizer.py: interrupted\n"
    assert _group_ends(process.pid)


def _group_ends(group):
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
