"""What a GPU would run to measure a tensor, without one; `test_triton_offline` tells how.

Registers must not spill, subnormals not be flushed, and tensors be read 16 bytes at a time.

This module is also the program that compiles: TRITON_INTERPRET, which the other tests need, must not be set there.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from tests.quantscope.formats.test_triton_offline import (
    ACCESS,
    CAPABILITIES,
    REPOSITORY,
    DriverWithoutGpu,
    compile_in_place_of_launching,
    resources,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HUGE = (1 << 16) + 16, 1 << 15  # 2^31 elements and more: sizes are 64 bits wide
KERNELS = ("count_kernel", "total_kernel")


@dataclass(frozen=True)
class Variant:
    """A tensor to measure."""

    dtype: torch.dtype
    blocks: bool
    shape: tuple[int, int] = (256, 512)
    columns: int | None = None  # that are measured of it

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}-{'blocks' if self.blocks else 'sums'}-{self.shape[0]}x{self.shape[1]}-{self.columns}"


WIDE = [
    Variant(BF16, blocks=True),
    Variant(BF16, blocks=False),
    Variant(FP16, blocks=True),
    Variant(FP32, blocks=True),
    Variant(BF16, blocks=True, shape=HUGE),
    Variant(BF16, blocks=True, columns=256),
    Variant(FP32, blocks=True, shape=HUGE, columns=1 << 14),
]
NARROW = [Variant(BF16, blocks=True, shape=(256, 99)), Variant(FP32, blocks=True, shape=(1, 1))]
by_capability = pytest.mark.parametrize("capability", CAPABILITIES)
by_variant = pytest.mark.parametrize("variant", [*WIDE, *NARROW], ids=str)


def main() -> None:
    """Print a line of JSON for each variant, capability and kernel."""
    from triton.runtime import driver

    from megatron.quantscope.formats import triton_counting, triton_statistics

    gpu, compiled = DriverWithoutGpu(), []
    driver.set_active(gpu)
    for name in KERNELS:
        compile_in_place_of_launching(vars(triton_counting)[name], compiled)
    for variant in (*WIDE, *NARROW):
        x = torch.empty(variant.shape, dtype=variant.dtype)[:, : variant.columns]  # never touched
        room = torch.empty(triton_statistics._ROW_BYTES + variant.blocks * x.numel(), dtype=torch.uint8)
        for capability, gpu.capability in CAPABILITIES.items():
            compiled.clear()
            triton_statistics._launch(*triton_statistics._prepared(x, variant.blocks), room, variant.blocks)
            for code in compiled:
                report = {"variant": str(variant), "capability": capability, "kernel": code.name}
                report |= {"ptx": code.asm["ptx"], "contracts": code.metadata.enable_fp_fusion}
                print(json.dumps(report | resources(code.asm["cubin"])), flush=True)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The lines of `main`, from a process of its own with an empty cache."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = [sys.executable, "-m", "tests.quantscope.formats.test_triton_statistics_offline"]
    run = subprocess.run(program, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = map(json.loads, run.stdout.splitlines())
    return {(line["variant"], line["capability"], line["kernel"]): line for line in lines}


@by_capability
@by_variant
@pytest.mark.parametrize("kernel", KERNELS)
def test_registers_do_not_spill(kernel, variant, capability, reports):
    report = reports[str(variant), capability, kernel]
    assert (report["STACK"], report["LOCAL"]) == (0, 0)
    assert 0 < report["REG"] <= 128  # two programs of 8 warps a multiprocessor, at the least


@by_capability
@by_variant
@pytest.mark.parametrize("kernel", KERNELS)
def test_arithmetic_is_that_of_ieee_754(kernel, variant, capability, reports):
    report = reports[str(variant), capability, kernel]
    assert not report["contracts"]
    for instruction in (".ftz", ".approx", ".full", "fma.", "atom.global", "red.global"):
        assert instruction not in report["ptx"]


@by_capability
@pytest.mark.parametrize("variant", WIDE, ids=str)
def test_tensors_are_read_16_bytes_at_a_time(variant, capability, reports):
    accesses = ACCESS.findall(reports[str(variant), capability, "count_kernel"]["ptx"])
    assert {access for access in accesses if access.startswith("ld")} == {"ld.global.v4.b32"}


if __name__ == "__main__":
    main()
