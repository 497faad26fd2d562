"""A run whose ranks start on an empty cache: the C++ kernels are compiled once, and every rank trains with them."""

import shutil

import pytest

from megatron.quantscope.formats.backends import BACKENDS
from tests.end_to_end.conftest import pretrain

RANKS = 2


@pytest.mark.slow
@pytest.mark.skipif(BACKENDS["cpp"].lacks() is not None, reason="no C++ kernels here")
def test_two_ranks_on_an_empty_cache_build_once(tmp_path):
    compiler, builds, cache = tmp_path / "c++", tmp_path / "builds", tmp_path / "cache"
    real = next(path for name in ("g++", "clang++", "c++") if (path := shutil.which(name)))
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *kernels.cc*) echo built >> "{builds}" ;; esac\nexec "{real}" "$@"\n')
    compiler.chmod(0o755)
    environment = {"QUANTSCOPE_CACHE": str(cache), "CXX": str(compiler)}
    flags = ["--tensor-model-parallel-size", RANKS, "--quant-type", "mxfp4"]
    run = pretrain(*flags, ranks=RANKS, **environment)
    assert len(run.losses) == 3
    assert "no C++ kernels" not in run.output
    assert builds.read_text().splitlines() == ["built"]
    kept = {path.name for path in (cache / "kernels").iterdir()} - {".lock"}
    assert [name.split("-")[0] + name[-3:] for name in kept] == ["native.so"]
    again = pretrain(*flags, ranks=RANKS, **environment)
    assert again.losses == run.losses
    assert builds.read_text().splitlines() == ["built"]
