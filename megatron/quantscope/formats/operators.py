"""Quantisation as operators of torch: what torch.compile and fake tensors see instead of a backend.

A traced graph must not look into a backend (an address given to C++ says nothing to a compiler), so `fake_quantize`
puts `quantscope::fake_quantize` into the graph in its place, and `quantize` its own operator. When the graph runs, an
operator calls the function with real tensors. Outside of tracing nothing goes through here, which saves the overhead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.quantscope.formats.catalog import FORMATS
from megatron.quantscope.formats.codes import NIBBLE, has_codes
from megatron.quantscope.formats.job import Job

_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """Whether x has no memory to read now: a graph is being recorded, or x is a fake (or another kind of) tensor."""
    return torch.compiler.is_compiling() or type(x) not in _PLAIN


def as_operator(x: Tensor, job: Job, backend: str) -> Tensor:
    """The result of `fake_quantize` as a node of the graph.

    Raises:
        ValueError: The format is not one of `FORMATS`.
    """
    result: Tensor = _fake_quantize(*_arguments(x, job), backend)
    return result


def codes_as_operator(x: Tensor, job: Job, backend: str) -> list[Tensor]:
    """The parts of `Quantized` that the format has, as a node of the graph.

    Raises:
        ValueError: The format is not one of `FORMATS`.
    """
    parts: list[Tensor] = _quantize(*_arguments(x, job), backend)
    return parts


def _arguments(x: Tensor, job: Job) -> tuple[Tensor, str, int, str, bool, Tensor | None]:
    """What a graph can hold: names, not records."""
    if FORMATS.get(job.fmt.name) is not job.fmt:
        raise ValueError(f"under torch.compile a format must be one of {', '.join(FORMATS)}, not {job.fmt.name!r}")
    return x.detach(), job.fmt.name, job.axis, job.scale_rule, job.saturate, job.amax


@torch.library.custom_op("quantscope::fake_quantize", mutates_args=())
def _fake_quantize(
    x: Tensor, fmt: str, axis: int, scale_rule: str, saturate: bool, amax: Tensor | None, backend: str
) -> Tensor:
    from megatron.quantscope.formats.dispatch import fake_quantize

    return fake_quantize(x, fmt, axis=axis, scale_rule=scale_rule, saturate=saturate, amax=amax, backend=backend)


@_fake_quantize.register_fake
def _(x: Tensor, fmt: str, axis: int, scale_rule: str, saturate: bool, amax: Tensor | None, backend: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("quantscope::quantize", mutates_args=())
def _quantize(
    x: Tensor, fmt: str, axis: int, scale_rule: str, saturate: bool, amax: Tensor | None, backend: str
) -> list[Tensor]:
    from megatron.quantscope.formats.encoding import quantize

    parts = quantize(x, fmt, axis=axis, scale_rule=scale_rule, saturate=saturate, amax=amax, backend=backend)
    return [part.contiguous() for part in parts if part is not None]


@_quantize.register_fake
def _(
    x: Tensor, fmt: str, axis: int, scale_rule: str, saturate: bool, amax: Tensor | None, backend: str
) -> list[Tensor]:
    record = FORMATS[fmt]
    shape = list(x.shape) or [1]
    scalar = [x.new_empty((), dtype=torch.float32)] if record.has_tensor_scale else []
    if not has_codes(record):
        return [x.new_empty(shape, dtype=torch.uint16)]
    along = shape[axis]
    codes = [*shape[:axis], (along + 1) // 2 if record.bits == NIBBLE else along, *shape[axis + 1 :]]
    parts = [x.new_empty(codes, dtype=torch.uint8)]
    if record.block is not None:
        blocks = (along + record.block - 1) // record.block
        parts.append(x.new_empty([*shape[:axis], blocks, *shape[axis + 1 :]], dtype=torch.uint8))
    return parts + scalar
