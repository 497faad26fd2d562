"""What a GPU would run, without one: every kernel as the backend launches it, compiled for Hopper and Blackwell.

A driver that only knows what GPU it stands for makes Triton go all the way of a launch but the last step: it looks at
the arguments (16 divides this address, that length is 1), compiles, and gives back the code. The machine code must not
spill registers, and the PTX must neither flush subnormals, nor contract a product and a sum into one operation, which
would not round the product, nor divide approximately; tensors must be read and written 16 bytes at a time.

This module is also the program that does so: TRITON_INTERPRET, which the other tests need, must not be set there.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[3]
CAPABILITIES = {"sm_90": 90, "sm_100": 100}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HUGE = (1 << 16) + 16, 1 << 15  # 2^31 elements and more: sizes are 64 bits wide
TINY = (1, 1)  # a size of 1 is a constant to Triton
VECTOR = re.compile(r"(ld|st)\.global\.v4\.b32")
ACCESS = re.compile(r"(?:ld|st)\.global\S*")
QUANTIZE, BOTH, ENCODE = "quantize", "both", "encode"


@dataclass(frozen=True)
class Variant:
    """A call of the backend."""

    call: str
    fmt: str
    dtype: torch.dtype = BF16
    axis: int = 1
    scale_rule: str = "floor"
    shape: tuple[int, int] = (256, 512)
    kernel: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel}-{self.call}-{self.fmt}-{dtype}-{self.scale_rule}-{self.shape[0]}x{self.shape[1]}"


VARIANTS = [
    Variant(QUANTIZE, "hifp8", kernel="flat"),
    Variant(QUANTIZE, "hifp8", FP32, kernel="flat"),
    Variant(QUANTIZE, "bf16", FP32, kernel="flat"),
    Variant(QUANTIZE, "fp16", kernel="flat"),
    Variant(QUANTIZE, "fp8_e4m3", kernel="flat"),
    Variant(QUANTIZE, "fp8_e5m2", FP16, kernel="amax"),
    Variant(QUANTIZE, "mxfp8", kernel="rows"),
    Variant(QUANTIZE, "mxfp4", FP32, scale_rule="rceil", kernel="rows"),
    Variant(QUANTIZE, "nvfp4", kernel="rows"),
    Variant(QUANTIZE, "mxfp6_e3m2", FP16, shape=(256, 80), kernel="rows"),
    Variant(QUANTIZE, "mxfp8", axis=0, kernel="columns"),
    Variant(QUANTIZE, "mxfp8_e5m2", FP32, 0, "rceil", kernel="columns"),
    Variant(QUANTIZE, "nvfp4", axis=0, kernel="columns"),
    Variant(BOTH, "mxfp8", kernel="both"),
    Variant(BOTH, "nvfp4", kernel="both"),
    Variant(ENCODE, "hifp8", kernel="flat"),
    Variant(ENCODE, "mxfp4", kernel="rows"),
    Variant(ENCODE, "nvfp4", axis=0, kernel="columns"),
    Variant(QUANTIZE, "hifp8", shape=HUGE, kernel="flat"),
    Variant(QUANTIZE, "mxfp8", shape=HUGE, kernel="rows"),
    Variant(QUANTIZE, "mxfp8", shape=(1, HUGE[0] * HUGE[1] + 16), kernel="rows"),
    Variant(QUANTIZE, "mxfp8", shape=HUGE, axis=0, kernel="columns"),
    Variant(BOTH, "mxfp8", shape=HUGE, kernel="both"),
    Variant(QUANTIZE, "fp8_e5m2", shape=HUGE, kernel="amax"),
]
TINY_VARIANTS = [
    Variant(QUANTIZE, "hifp8", shape=TINY, kernel="flat"),
    Variant(QUANTIZE, "mxfp8", shape=TINY, kernel="rows"),
    Variant(QUANTIZE, "mxfp8", shape=(1, 9), axis=0, kernel="columns"),
    Variant(BOTH, "mxfp8", shape=TINY, kernel="both"),
    Variant(QUANTIZE, "fp8_e5m2", shape=TINY, kernel="amax"),
]
by_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
by_capability = pytest.mark.parametrize("capability", CAPABILITIES)


class DriverWithoutGpu:
    """A driver of Triton, of which compiling asks no more than this: devices are numbered by their capability."""

    capability = 90

    def get_current_device(self) -> int:
        return self.capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_in_place_of_launching(kernel: Any, compiled: list[Any]) -> None:
    """Let a kernel's launches end with its code in a list."""
    run = kernel.run

    def warm_up(*arguments: object, warmup: bool = False, **named: object) -> None:
        compiled.append(run(*arguments, warmup=True, **named))

    kernel.run = warm_up


def call_backend(variant: Variant) -> None:
    from megatron.quantscope.formats import triton_backend
    from megatron.quantscope.formats.job import make_job
    from megatron.quantscope.formats.slabs import empty_scales

    x = torch.empty(variant.shape, dtype=variant.dtype)  # never touched, so that a huge one takes no memory
    job = make_job(x, variant.fmt, axis=variant.axis, scale_rule=variant.scale_rule, saturate=None, amax=None)
    if variant.call == QUANTIZE:
        triton_backend.run(x, x, job)
    elif variant.call == BOTH:
        triton_backend.run_both(x, x, x, job)
    else:
        scales = None if job.fmt.block is None else empty_scales(x, variant.axis, job.fmt.block)
        triton_backend.encode(x, torch.empty_like(x, dtype=torch.uint8), scales, job)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory by the disassembler that Triton brings along; spills lie in one of the last."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def main() -> None:
    """Print a line of JSON for each variant and capability."""
    from triton.runtime import driver

    from megatron.quantscope.formats import triton_kernels

    gpu, compiled = DriverWithoutGpu(), []
    driver.set_active(gpu)
    for name, kernel in list(vars(triton_kernels).items()):
        if name.endswith("_kernel"):
            compile_in_place_of_launching(kernel, compiled)
    for variant in (*VARIANTS, *TINY_VARIANTS):
        for capability, gpu.capability in CAPABILITIES.items():
            compiled.clear()
            call_backend(variant)
            (code,) = [code for code in compiled if code.name == f"{variant.kernel}_kernel"]
            report = {
                "variant": str(variant),
                "capability": capability,
                "ptx": code.asm["ptx"],
                "contracts": code.metadata.enable_fp_fusion,
                "shared": code.metadata.shared,
                **resources(code.asm["cubin"]),
            }
            print(json.dumps(report), flush=True)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The lines of `main`, by variant and capability, from a process of its own with an empty cache."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = [sys.executable, "-m", "tests.quantscope.formats.test_triton_offline"]
    run = subprocess.run(program, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {(line["variant"], line["capability"]): line for line in map(json.loads, run.stdout.splitlines())}


@by_capability
@pytest.mark.parametrize("variant", [*VARIANTS, *TINY_VARIANTS], ids=str)
def test_registers_do_not_spill(variant, capability, reports):
    """Nor does the smallest tensor, all of whose sizes are constants, break the compilation."""
    report = reports[str(variant), capability]
    assert (report["STACK"], report["LOCAL"]) == (0, 0)
    assert 0 < report["REG"] < 256


@by_capability
@by_variant
def test_arithmetic_is_that_of_ieee_754(variant, capability, reports):
    report = reports[str(variant), capability]
    ptx = report["ptx"]
    assert not report["contracts"]
    for instruction in (".ftz", ".approx", ".full", "fma.", "ex2.", "lg2."):
        assert instruction not in ptx
    assert ("div.rn.f32" in ptx) == (variant.fmt in ("nvfp4", "fp8_e4m3"))
    if variant.dtype == BF16 and variant.call != ENCODE and variant.kernel != "amax":
        assert "cvt.rn.bf16" in ptx


@by_capability
@by_variant
def test_memory_is_read_and_written_16_bytes_at_a_time(variant, capability, reports):
    """But for one scalar, the amax of the tensor, and for the bytes of the tables and scales."""
    accesses = ACCESS.findall(reports[str(variant), capability]["ptx"])
    vectors = [access for access in accesses if VECTOR.fullmatch(access)]
    assert any(access.startswith("ld") for access in vectors)
    assert variant.kernel == "amax" or any(access.startswith("st") for access in vectors)
    if variant.call != ENCODE:
        assert len(accesses) - len(vectors) == (variant.fmt in ("nvfp4", "fp8_e4m3"))


@by_capability
@by_variant
def test_maxima_stay_in_their_warp(variant, capability, reports):
    if variant.kernel != "amax" and variant.call != ENCODE:
        assert reports[str(variant), capability]["shared"] == 0


if __name__ == "__main__":
    main()
