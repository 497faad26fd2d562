"""Golden vectors, and the comparison that all tests of formats make: bit by bit."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.quantscope.formats import cpp_backend, cpp_build
from megatron.quantscope.formats.backends import BACKENDS

REPOSITORY = Path(__file__).parents[3]
SMALL, WHOLE = REPOSITORY / "tests" / "golden", REPOSITORY.parent / "shared" / "golden"
WIDTHS = {"avx2": (32,), "portable": (16,), "native": (16, 32, 64)}  # bytes
FOLDERS = [pytest.param(folder, id=name) for name, folder in (("small", SMALL), ("whole", WHOLE)) if folder.is_dir()]


@pytest.fixture(params=["cpp", "torch", "reference"])
def backend(request) -> str:
    """The backends of the CPU, one after the other; the reference takes a block at a time, so give it little."""
    if reason := BACKENDS[request.param].lacks():
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=cpp_build.ARCHITECTURES)
def architecture(request, monkeypatch) -> Iterator[str]:
    """`backend="cpp"` runs the kernels of one architecture after the other."""
    name = request.param
    try:
        cpp_build._compiler()
    except cpp_build.BuildError as error:
        pytest.skip(str(error))
    if name == "avx2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip(f"this {platform.machine()} has no AVX2")
    library = cpp_build.library(name)
    assert library is not None, "there is a compiler, and it failed"
    assert library.qs_width() in WIDTHS[name]
    monkeypatch.setattr(cpp_backend, "library", lambda: library)
    cpp_backend.kernels.cache_clear()
    assert cpp_backend.kernels() is library
    yield name
    cpp_backend.kernels.cache_clear()


@pytest.fixture(params=FOLDERS)
def golden(request) -> Callable[[str], dict[str, np.ndarray]]:
    """Loads a golden file: from the copy in the repository and, where it is there, from the whole set beside it."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(request.param / f"{name}.npz") as arrays:
            return dict(arrays)

    return load


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[[Tensor, Tensor | np.ndarray], None]:
    """Equal in every bit, the sign of zero among them; any NaN equals any NaN."""

    def check(actual: Tensor, expected: Tensor | np.ndarray) -> None:
        expected = torch.as_tensor(expected).to(actual.dtype)
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
        assert actual.shape == expected.shape
        same = actual.contiguous().view(integer) == expected.contiguous().view(integer)
        wrong = torch.nonzero(~(same | (actual.isnan() & expected.isnan())))
        first = [tuple(index) for index in wrong[:3].tolist()]
        assert not len(wrong), f"{len(wrong)} differ: {[(i, actual[i].item(), expected[i].item()) for i in first]}"

    return check


@pytest.fixture(scope="session")
def every_pattern() -> Callable[[torch.dtype], Tensor]:
    """All 65,536 values of bf16 or fp16."""

    def make(dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)

    return make
