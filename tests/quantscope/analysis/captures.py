"""Small captures for the tests of analysis, report and visualizer, written by the session that training uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates

TOKENS, WIDTH, HIDDEN, HEADS, GROUPS, HEAD_DIM = 32, 48, 64, 4, 2, 16
Spoil = Callable[[str, int, str, Tensor], Tensor]
"""(module, layer, tensor name, tensor) -> what is captured instead."""

LINEARS = {
    "self_attention.linear_qkv": (WIDTH, HEADS * HEAD_DIM + 2 * GROUPS * HEAD_DIM),
    "self_attention.linear_proj": (HEADS * HEAD_DIM, WIDTH),
    "mlp.linear_fc1": (WIDTH, 2 * HIDDEN),
    "mlp.linear_fc2": (HIDDEN, WIDTH),
}
ATTENTION = "self_attention.core_attention"
GRADIENT = 2.0**-14


def write_capture(
    directory: Path,
    quant_type: str = "mxfp8",
    *,
    run_id: str = "20261121_120000_aaaaaa",
    layers: int = 2,
    iterations: int = 1,
    micro_batches: int = 1,
    ranks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    spoil: Spoil = lambda module, layer, name, tensor: tensor,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a capture with every row of a small transformer's linear layers and attention; returns `directory`.

    `config` are further settings of `CaptureConfig`.
    """
    for rank in range(ranks):
        session = CaptureSession(
            CaptureConfig(
                enabled=True,
                directory=directory,
                control_iter=iterations,
                collect_micro_batches=micro_batches,
                **config,
            ),
            quant_type=quant_type,
            rank=rank,
            parallel=ParallelCoordinates(dp_rank=rank, dp_size=ranks),
            run_id=run_id,
            run_info={"versions": {"torch": torch.__version__}, "command": ["pretrain_gpt.py"]},
        )
        for iteration in range(iterations):
            session.begin_iteration(iteration)
            for micro_batch in range(micro_batches):
                session.begin_micro_batch(micro_batch, [ranks * (iteration * micro_batches + micro_batch) + rank])
                generator = torch.Generator().manual_seed(seed + 100 * rank + 10 * iteration + micro_batch)
                _write_micro_batch(session, layers, dtype, generator, spoil)
            session.end_iteration({"lm loss": 3.0 - 0.1 * iteration + 0.01 * len(quant_type)})
        session.close()
    return directory


def _write_micro_batch(
    session: CaptureSession, layers: int, dtype: torch.dtype, generator: torch.Generator, spoil: Spoil
) -> None:
    weights = torch.Generator().manual_seed(7)
    for layer in range(layers):
        for module, (inputs, outputs) in LINEARS.items():
            weight = torch.randn(outputs, inputs, generator=weights)
            tensors = {
                ("forward", "pre", "input"): torch.randn(TOKENS, 1, inputs, generator=generator),
                ("forward", "pre", "weight"): weight,
                ("forward", "post", "output"): torch.randn(TOKENS, 1, outputs, generator=generator),
                ("backward", "pre", "grad_output"): GRADIENT * torch.randn(TOKENS, 1, outputs, generator=generator),
                ("backward", "pre", "weight"): weight,
                ("backward", "post", "grad_input"): GRADIENT * torch.randn(TOKENS, 1, inputs, generator=generator),
                ("backward", "post", "grad_weight"): GRADIENT * torch.randn(outputs, inputs, generator=generator),
            }
            _tap(session, module, "linear", layer, tensors, dtype, spoil)
        of_query, of_key = (TOKENS, 1, HEADS, HEAD_DIM), (TOKENS, 1, GROUPS, HEAD_DIM)
        shapes = {
            ("forward", "pre", "query"): of_query,
            ("forward", "pre", "key"): of_key,
            ("forward", "pre", "value"): of_key,
            ("forward", "post", "output"): (TOKENS, 1, HEADS * HEAD_DIM),
            ("backward", "pre", "grad_output"): (TOKENS, 1, HEADS * HEAD_DIM),
            ("backward", "post", "grad_query"): of_query,
            ("backward", "post", "grad_key"): of_key,
            ("backward", "post", "grad_value"): of_key,
        }
        tensors = {
            key: (GRADIENT if key[0] == "backward" else 1.0) * torch.randn(shape, generator=generator)
            for key, shape in shapes.items()
        }
        _tap(session, ATTENTION, "attention", layer, tensors, dtype, spoil)


def _tap(session, module, layer_type, layer, tensors, dtype, spoil) -> None:
    site = session.site(
        module=f"decoder.layers.{layer}.{module}",
        layer_type=layer_type,
        component="linear" if layer_type == "linear" else "FA",
        layer_idx=layer,
        formats={},
        **({"head_dim": HEAD_DIM, "softmax_scale": HEAD_DIM**-0.5} if layer_type == "attention" else {}),
    )
    tap = site.tap()
    for (operation, phase, name), tensor in tensors.items():
        tap(operation, phase, name, spoil(module, layer, name, tensor.to(dtype)))


def save(path: Path, tensor: Tensor, **metadata) -> Path:
    """One bare file, as another tool writes it."""
    torch.save({"tensor": tensor, "metadata": metadata} if metadata else tensor, path)
    return path
