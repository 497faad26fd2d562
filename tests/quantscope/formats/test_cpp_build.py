"""The C++ kernels are built once, however many ask at a time; where they can not be, torch runs instead."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest
import torch

from megatron.quantscope.formats import cpp_backend, cpp_build, fake_quantize
from megatron.quantscope.formats.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120
RANKS = 4
WARNING = "no C++ kernels, formats run on the slower torch backend"
RANK = """
import sys, time
from pathlib import Path
import torch
from megatron.quantscope.formats import cpp_build, fake_quantize

here, ranks = Path(sys.argv[1]), int(sys.argv[2])
(here / f"ready{sys.argv[3]}").touch()
while len(list(here.glob("ready*"))) < ranks:
    time.sleep(0.005)
x = torch.tensor([500.0, 17.0, 0.3])
print(fake_quantize(x, "mxfp8").tolist(), cpp_build.library() is not None)
"""
LOAD = "from megatron.quantscope.formats.cpp_build import library; print(library() and library().qs_width() > 0)"
BUILDS = 'case "$*" in *kernels.cc*) ;; *) exit 0 ;; esac\n'  # anything else asks for the version
OUTPUT = "for output; do :; done\n"

pytestmark = pytest.mark.skipif(BACKENDS["cpp"].lacks() is not None, reason="no C++ kernels here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of kernels in an empty cache, and a process that has not looked for any yet."""
    monkeypatch.setenv("QUANTSCOPE_CACHE", str(tmp_path / "an empty cache"))
    memories = (cpp_build.library, cpp_build._temporary_directory, cpp_backend.kernels)
    for remembered in memories:
        remembered.cache_clear()
    yield tmp_path / "an empty cache" / "kernels"
    for remembered in memories:
        remembered.cache_clear()


@pytest.fixture(scope="module")
def built() -> Path:
    """The library, built before a test empties the cache."""
    return cpp_build._built("native")


@pytest.fixture
def compiler(tmp_path, monkeypatch, built):
    """`compiler(script)` makes a shell script $CXX; `compiler.log` has a line for each time that it is to build."""

    def make(script: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f'#!/bin/sh\n{BUILDS}echo built >> "{make.log}"\n{OUTPUT}{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    make.log = tmp_path / "builds"
    make.log.touch()
    make.quick = f'cp "{built}" "$output"'  # the right result, without the work
    return make


def builds(compiler) -> int:
    return len(compiler.log.read_text().splitlines())


def files(cache: Path) -> list[str]:
    """What a cache holds, but for the lock."""
    return sorted(path.name for path in cache.glob("*") if path.name != ".lock")


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output, errors


def test_processes_that_start_together_build_once(cache, compiler, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    compiler(f'exec "{cpp_build._compiler()[0]}" "$@" -O0')
    processes = [start(RANK, tmp_path, RANKS, rank) for rank in range(RANKS)]
    for output, errors in map(finish, processes):
        assert output == "[448.0, 16.0, 0.3125] True\n"
        assert errors == ""
    assert builds(compiler) == 1
    assert [Path(name).suffix for name in files(cache)] == [".so"]


def test_threads_that_start_together_build_once(cache, compiler):
    compiler(f"sleep 0.2; {compiler.quick}")
    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(cpp_build._built, repeat("native", RANKS)))
    assert len(set(found)) == 1
    assert builds(compiler) == 1
    assert files(cache) == [found[0].name]


def test_a_later_process_finds_what_the_first_one_built(cache, compiler):
    compiler(compiler.quick)
    for _ in range(2):
        assert finish(start(LOAD))[0] == "True\n"
    assert builds(compiler) == 1


@pytest.mark.parametrize("cxx", [None, "", "/nonexistent/c++", "no-such-compiler"])
def test_without_a_compiler_torch_runs_after_one_warning(cxx, cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False) if cxx is None else monkeypatch.setenv("CXX", cxx)
    x = torch.tensor([500.0, 17.0, 0.3])
    for _ in range(3):
        assert fake_quantize(x, "mxfp8").tolist() == [448.0, 16.0, 0.3125]
        assert fake_quantize(x.bfloat16(), "hifp8").tolist() == [512.0, 16.0, 0.3125]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    wanted = cxx or "g++, clang++, c++"
    assert record.getMessage() == f"{WARNING}: no C++ compiler found: looked for {wanted}; set CXX"
    with pytest.raises(ValueError, match=r"^backend 'cpp' is not available here: the C\+\+ kernels could not .*$"):
        fake_quantize(x, "mxfp8", backend="cpp")
    assert len(caplog.records) == 1
    assert files(cache) == []


def test_a_process_without_a_compiler_says_so_once(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    output, errors = finish(start(RANK, tmp_path, 1, 0))
    assert output == "[448.0, 16.0, 0.3125] False\n"
    assert errors == f"{WARNING}: no C++ compiler found: looked for /nonexistent/c++; set CXX\n"


@pytest.mark.parametrize("half_done", ["", 'echo half > "$output"\n'])
def test_a_compiler_that_fails(half_done, cache, compiler, caplog):
    compiler(f"{half_done}echo 'kernels.cc:1: error: not my language' >&2; echo 'and more of it' >&2; exit 3")
    assert fake_quantize(torch.tensor([500.0, 17.0]), "mxfp8").tolist() == [448.0, 16.0]
    fake_quantize(torch.ones(3), "mxfp4")
    (record,) = caplog.records
    reason = f"{os.environ['CXX']} failed with exit code 3: kernels.cc:1: error: not my language"
    assert record.getMessage() == f"{WARNING}: {reason}"
    assert files(cache) == []
    assert builds(compiler) == 2  # with threads, and without


def test_a_compiler_that_dies_without_a_word(cache, compiler, caplog):
    compiler("kill -9 $$")
    assert cpp_build.library() is None
    assert caplog.messages == [f"{WARNING}: {os.environ['CXX']} failed with exit code -9: no message"]


def test_a_compiler_that_does_not_come_back(cache, compiler, caplog, monkeypatch):
    compiler('echo half > "$output"; exec sleep 60')
    monkeypatch.setattr(cpp_build, "_BUILD_TIMEOUT_S", 0.3)
    assert cpp_build.library() is None
    assert caplog.messages == [f"{WARNING}: {os.environ['CXX']} took more than 0.3 s"]
    assert files(cache) == []


def test_a_compiler_without_openmp_makes_kernels_of_one_thread(cache, compiler, caplog):
    compiler(f'case "$*" in *-fopenmp*) echo "unknown option" >&2; exit 1 ;; esac\n{compiler.quick}')
    assert cpp_build.library() is not None
    assert caplog.messages == []
    assert builds(compiler) == 2
    assert len(files(cache)) == 1


def test_a_cache_that_can_not_be_made(cache, compiler, monkeypatch, tmp_path, caplog):
    """Its folder would lie in a file: not even the superuser can do that."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTSCOPE_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", None)
    compiler(compiler.quick)
    assert fake_quantize(torch.tensor([500.0, 17.0]), "mxfp8", backend="cpp").tolist() == [448.0, 16.0]
    assert caplog.messages == []
    assert len(list(tmp_path.glob("quantscope-kernels-*/native-*.so"))) == 1


def write_protect(monkeypatch) -> None:
    """No folder can be written, also for the superuser, who may write anywhere."""
    access = os.access
    monkeypatch.setattr(cpp_build.os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))


def test_a_cache_that_can_not_be_written(cache, compiler, monkeypatch, tmp_path):
    cache.mkdir(parents=True)
    write_protect(monkeypatch)
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", str(tmp_path))
    compiler(compiler.quick)
    assert cpp_build.library() is not None
    assert list(cache.iterdir()) == []


def test_a_library_in_a_cache_that_can_not_be_written_is_used(cache, compiler, monkeypatch, tmp_path):
    compiler(compiler.quick)
    cpp_build._built("native")
    write_protect(monkeypatch)
    monkeypatch.setattr(cpp_build.tempfile, "tempdir", str(tmp_path))
    cpp_build._built("native")
    assert builds(compiler) == 1


def test_the_temporary_folder_of_a_process_goes_with_it(cache, compiler, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTSCOPE_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    compiler(compiler.quick)
    assert finish(start(LOAD))[0] == "True\n"
    assert list(tmp_path.glob("quantscope-kernels-*")) == []


def test_a_library_that_can_not_be_loaded_is_built_again(cache, compiler):
    """Such as a power failure leaves it."""
    compiler(compiler.quick)
    cpp_build._built("native").write_bytes(b"")
    assert cpp_build.library() is not None


def test_a_library_that_can_not_be_loaded_does_not_end_the_run(cache, compiler):
    compiler(compiler.quick)
    cpp_build._built("native").write_bytes(b"")
    assert fake_quantize(torch.tensor([500.0, 17.0]), "mxfp8").tolist() == [448.0, 16.0]


@pytest.fixture
def name_of_library(tmp_path, monkeypatch):
    """The name that the library has now, with sources that one may change."""
    sources = tmp_path / "cpp"
    shutil.copytree(cpp_build.SOURCES, sources)
    monkeypatch.setattr(cpp_build, "SOURCES", sources)
    return lambda: cpp_build._built("native").name


def appended(path: Path) -> None:
    with path.open("a") as file:
        file.write("\n")


CHANGES = {
    "a source": lambda monkeypatch: appended(cpp_build.SOURCES / cpp_build.MAIN),
    "a header": lambda monkeypatch: appended(cpp_build.SOURCES / "lanes.h"),
    "a new header": lambda monkeypatch: (cpp_build.SOURCES / "more.h").touch(),
    "a header's name": lambda monkeypatch: (cpp_build.SOURCES / "lanes.h").rename(cpp_build.SOURCES / "lanes2.h"),
    "a flag": lambda monkeypatch: monkeypatch.setattr(cpp_build, "_FLAGS", (*cpp_build._FLAGS, "-g")),
    "the processor": lambda monkeypatch: monkeypatch.setattr(cpp_build, "_processor", lambda: "another one"),
    "the compiler": lambda monkeypatch: Path(os.environ["CXX"]).rename(Path(os.environ["CXX"]).with_name("other")),
    "the compiler's version": lambda monkeypatch: Path(os.environ["CXX"]).write_text(
        Path(os.environ["CXX"]).read_text().replace("*) exit 0", "*) echo 2.0; exit 0")
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_library_depends_on_is_in_its_name(what, cache, compiler, name_of_library, monkeypatch):
    compiler(compiler.quick)
    first = name_of_library()
    assert name_of_library() == first
    CHANGES[what](monkeypatch)
    if what == "the compiler":
        monkeypatch.setenv("CXX", str(Path(os.environ["CXX"]).with_name("other")))
    second = name_of_library()
    assert second != first
    assert files(cache) == sorted([first, second])
    assert builds(compiler) == 2


def test_architectures_have_names_of_their_own(cache, compiler):
    compiler(compiler.quick)
    names = {cpp_build._built(architecture).name for architecture in cpp_build.ARCHITECTURES}
    assert sorted(name.split("-")[0] for name in names) == sorted(cpp_build.ARCHITECTURES)


def test_a_process_killed_while_compiling_leaves_nothing_that_is_loaded(cache, compiler, tmp_path):
    """Nor does it keep the lock, though its compiler still runs."""
    pid = tmp_path / "pid"
    compiler(f'[ -e "{pid}" ] && {compiler.quick} && exit\necho half > "$output"; echo $$ > "{pid}"; exec sleep 60')
    first = start(LOAD)
    deadline = time.monotonic() + TIMEOUT_S
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.kill()
    first.communicate()
    try:
        assert [Path(name).suffix for name in files(cache)] == [".tmp"]
        output, errors = finish(start(LOAD))
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert (output, errors) == ("True\n", "")
    assert [Path(name).suffix for name in files(cache)].count(".so") == 1
