"""Captures of any size for the benchmark, out of a small one: its files, linked under new names, in new iterations.

Every copy of a row has a file, a name and a checksum of its own, so to the analysis it is a tensor of its own, which is
opened, mapped and measured like any other; on disk, and in the page cache, its bytes are those of the first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENS, WIDTH, HIDDEN, HEADS, GROUPS, HEAD_DIM = 256, 576, 1536, 9, 3, 64  # SmolLM2-135M, one sample
_LAYERS = 2
_MANIFEST = "manifest_rank0.jsonl"


def small_capture(folder: Path) -> Path:
    """Write a bf16 capture with the shapes of SmolLM2-135M and normally distributed values."""
    import torch

    from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates

    session = CaptureSession(
        CaptureConfig(enabled=True, directory=folder, control_iter=1, collect_micro_batches=1),
        quant_type="bf16",
        rank=0,
        parallel=ParallelCoordinates(),
        run_id="20261121_120000_bbbbbb",
        run_info={},
    )
    generator = torch.Generator().manual_seed(0)
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    for layer in range(_LAYERS):
        for module, inputs, outputs in _linears():
            site = session.site(
                module=f"decoder.layers.{layer}.{module}",
                layer_type="linear",
                component="linear",
                layer_idx=layer,
                formats={},
            )
            tap = site.tap()
            shapes = {
                ("forward", "pre", "input"): (TOKENS, 1, inputs),
                ("forward", "pre", "weight"): (outputs, inputs),
                ("forward", "post", "output"): (TOKENS, 1, outputs),
                ("backward", "pre", "grad_output"): (TOKENS, 1, outputs),
                ("backward", "post", "grad_input"): (TOKENS, 1, inputs),
                ("backward", "post", "grad_weight"): (outputs, inputs),
            }
            for (operation, phase, name), shape in shapes.items():
                tap(operation, phase, name, torch.randn(shape, generator=generator).bfloat16())
    session.end_iteration({"lm loss": 3.0})
    session.close()
    return folder


def _linears() -> Iterator[tuple[str, int, int]]:
    yield "self_attention.linear_qkv", WIDTH, (HEADS + 2 * GROUPS) * HEAD_DIM
    yield "self_attention.linear_proj", HEADS * HEAD_DIM, WIDTH
    yield "mlp.linear_fc1", WIDTH, 2 * HIDDEN
    yield "mlp.linear_fc2", HIDDEN, WIDTH


def repeated_capture(source: Path, folder: Path, size: int) -> Path:
    """Write a capture of at least `size` bytes that repeats the one type of `source`; returns `folder`."""
    manifest = next(source.rglob(f"runs/*/{_MANIFEST}"))
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    commit = next(line for line in lines if line["kind"] == "commit")
    files = manifest.parents[2]
    target = folder / files.name / manifest.relative_to(files)
    target.parent.mkdir(parents=True)
    shutil.copy(manifest.parent / "run.json", target.parent)
    copies = -(-size // commit["bytes"])
    with open(target, "w", encoding="utf-8") as written:
        for copy in range(copies):
            for line in lines:
                if line["kind"] in ("tensor", "commit") and line["iteration"] == commit["iteration"]:
                    written.write(json.dumps(_copied(line, copy)) + "\n")
            for name in {line["file"] for line in lines if line["kind"] == "tensor"}:
                _link(files / name, target.parents[2] / _renamed(name, copy))
    return folder


def _copied(line: dict[str, Any], copy: int) -> dict[str, Any]:
    if line["kind"] == "commit":
        return {**line, "iteration": copy}
    checksum = f"{line['checksum'][:-6]}{copy:06x}"
    return {**line, "iteration": copy, "file": _renamed(line["file"], copy), "checksum": checksum}


def _renamed(name: str, copy: int) -> str:
    before, _, after = name.partition("_iter")
    return f"{before}_iter{copy:03d}{after[after.index('_') :]}"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        target.symlink_to(source.absolute())
