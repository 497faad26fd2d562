#!/usr/bin/env python3
"""Run the tests of the overlay and of capture on several megatron-core versions, and print one table.

    python script/version_matrix.py                                  every row; see ROWS
    python script/version_matrix.py --rows 0.14.0 0.16.1             these versions
    python script/version_matrix.py --python 3.12=/path/to/python    an interpreter that has what the tests need
    python script/version_matrix.py --rows --stock /path/to/Megatron-LM   a checkout underneath, its version looked up

A full environment a version would install torch over and over, for a package that is Python and one small library.
So an environment is needed for each Python version only: the one that runs this script, one given by --python, or a
venv made here by pip from requirements/. A row whose megatron-core is not the one in there gets its own, alone, in a
folder (`pip install --no-deps --target`) that comes before the environment on PYTHONPATH.

The losses are those of three steps of one small model with quantised GEMMs: they say whether versions compute alike.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = {"0.14.0": "3.11", "0.15.3": "3.11", "0.16.1": "3.11", "0.19.2": "3.12"}  # megatron-core -> Python
NEEDS_3_12 = (0, 17)  # megatron-core from here on
TESTS = ("tests/core", "tests/end_to_end", "tests/training")
HEADER = ("megatron-core", "Python", "torch", "passed", "failed", "skipped", "seconds", "losses of three steps")
STOCK = "checkout"
DONE, FAILED = 0, 1

TRAIN = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 3 --lr 1e-3 --eval-iters 0 --log-interval 1 --seed 7 --quant-type mxfp8"
)
LOSS = re.compile(r"lm loss: (\S+)")
FACTS = "import sys, torch, megatron.core as m; print(m.__version__, sys.version.split()[0], torch.__version__)"


class MatrixError(Exception):
    """A row can not be run; one line."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One version to test.

    Attributes:
        version: Of megatron-core.
        python: Python version, "3.11".
        checkout: A Megatron-LM checkout to lay over instead of an installed megatron-core.
    """

    version: str
    python: str
    checkout: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one row: the cells of its line, and whether it went well."""

    cells: tuple[str, ...]
    passed: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows and print the table; 1 when any test failed."""
    options = _parser().parse_args(argv)
    folder = Path(options.directory or tempfile.mkdtemp(prefix="version_matrix_"))
    results = []
    try:
        for row in _rows(options):
            print(f"megatron-core {row.version}, Python {row.python} ...", file=sys.stderr, flush=True)
            results.append(_run(row, folder, options))
    except MatrixError as error:
        print(f"version_matrix.py: error: {error}", file=sys.stderr)
        return FAILED
    finally:
        if results:
            print(_table([result.cells for result in results]))
        if not (options.keep or options.directory):
            shutil.rmtree(folder)
    return DONE if all(result.passed for result in results) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="version_matrix.py", description=(__doc__ or "").splitlines()[0])
    rows = ", ".join(ROWS)
    parser.add_argument("--rows", nargs="*", metavar="VERSION", default=list(ROWS), help=f"versions (default: {rows})")
    parser.add_argument("--stock", type=Path, metavar="DIR", help="a row more: a Megatron-LM checkout underneath")
    parser.add_argument(
        "--python", action="append", default=[], metavar="X.Y=PATH", help="the interpreter of a Python version"
    )
    parser.add_argument("--tests", nargs="+", default=list(TESTS), metavar="PATH", help=f"default: {' '.join(TESTS)}")
    parser.add_argument("--jobs", default="0", metavar="N", help="processes that run tests (default: 0, this one)")
    parser.add_argument("--directory", metavar="DIR", help="where environments and packages are made and found again")
    parser.add_argument("--keep", action="store_true", help="keep them, also without --directory")
    return parser


def _rows(options: argparse.Namespace) -> list[Row]:
    rows = [Row(version=version, python=_python_of(version)) for version in options.rows]
    if options.stock is not None:
        version = _checkout_version(options.stock)
        rows.append(Row(version=version, python=_python_of(version), checkout=options.stock.resolve()))
    return rows


def _python_of(version: str) -> str:
    """The Python version that a megatron-core is tested with."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return ROWS.get(version, "3.12" if numbers >= NEEDS_3_12 else "3.11")


def _checkout_version(checkout: Path) -> str:
    path = checkout / "megatron" / "core" / "package_info.py"
    if not path.is_file():
        raise MatrixError(f"{checkout} is no Megatron-LM checkout: no {path}")
    fields = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", path.read_text(), re.MULTILINE))
    return ".".join(fields[name] for name in ("MAJOR", "MINOR", "PATCH"))


def _run(row: Row, folder: Path, options: argparse.Namespace) -> Result:
    python = _interpreter(row.python, folder, options.python)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    underneath = row.checkout or _package(row.version, python, folder)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([str(underneath)] if underneath else [])])
    facts = _output([python, "-W", "ignore", "-c", FACTS], environment).split()
    if facts[0].split("+")[0] != row.version:
        raise MatrixError(f"megatron-core {facts[0]} was found where {row.version} was to be")
    start = time.monotonic()
    counts = _tested(python, environment, folder / f"{row.version}.xml", options)
    seconds = f"{time.monotonic() - start:.0f}"
    losses = LOSS.findall(_output([python, "-W", "ignore", str(ROOT / "pretrain_gpt.py"), *TRAIN.split()], environment))
    name = f"{row.version} ({STOCK})" if row.checkout else row.version
    cells = (name, facts[1], facts[2], *map(str, counts), seconds, " ".join(losses) or "none")
    return Result(cells=cells, passed=counts[0] > 0 and counts[1] == 0 and len(losses) == 3)


def _interpreter(version: str, folder: Path, given: Sequence[str]) -> str:
    """A Python of that version with what the tests need: given by hand, this one, or a venv made for it."""
    by_hand = dict(each.split("=", 1) for each in given if "=" in each)
    if version in by_hand:
        return by_hand[version]
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    venv = folder / f"python{version}"
    python = venv / "bin" / "python"
    if not python.exists():
        base = shutil.which(f"python{version}")
        if base is None:
            raise MatrixError(f"no python{version} on the PATH; give one by --python {version}=PATH")
        requirements = ROOT / "requirements"
        pins = folder / "constraints.txt"
        lines = (requirements / "constraints.txt").read_text().splitlines(keepends=True)
        pins.write_text("".join(line for line in lines if not line.startswith("megatron-core")))
        _output([base, "-m", "venv", str(venv)], None)
        files = [part for name in ("runtime.txt", "test.txt") for part in ("-r", str(requirements / name))]
        _output([str(python), "-m", "pip", "install", "-q", "-c", str(pins), *files], None)
    return str(python)


def _package(version: str, python: str, folder: Path) -> Path | None:
    """A folder that holds that megatron-core alone; None where the environment has it itself."""
    ask = "from importlib import metadata; print(metadata.version('megatron-core'))"
    if _output([python, "-c", ask], None).strip() == version:
        return None
    target = folder / f"megatron-core-{version}"
    if not (target / "megatron" / "core").is_dir():
        package = f"megatron-core=={version}"
        _output([python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), package], None)
    return target


def _tested(python: str, environment: dict[str, str], report: Path, options: argparse.Namespace) -> tuple[int, ...]:
    """Tests that passed, failed and were skipped."""
    tests = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        options.jobs,
        f"--junit-xml={report}",
        *options.tests,
    ]
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    with open(report.with_suffix(".log"), "w") as log:
        subprocess.run([python, *tests], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if not report.is_file():
        raise MatrixError(f"pytest wrote no report: see {report.with_suffix('.log')} (kept with --keep)")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return total - failed - skipped, failed, skipped


def _output(command: Sequence[str], environment: dict[str, str] | None) -> str:
    """What a command prints.

    Raises:
        MatrixError: when it fails.
    """
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MatrixError(f"{' '.join(command[:4])} ... failed with {result.returncode}: {last}")
    return result.stdout


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as a Markdown table whose columns line up."""
    lines = [HEADER, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
