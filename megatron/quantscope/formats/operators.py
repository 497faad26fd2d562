"""Fake quantisation as an operator of torch: what torch.compile and fake tensors see instead of a backend.

A traced graph must not look into a backend (an address given to C++ says nothing to a compiler), so `fake_quantize`
puts `quantscope::fake_quantize` into the graph in its place. When the graph runs, the operator calls `fake_quantize`
with real tensors. Outside of tracing nothing goes through here, which saves the operator's overhead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.quantscope.formats.catalog import FORMATS
from megatron.quantscope.formats.job import Job

_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """Whether x has no memory to read now: a graph is being recorded, or x is a fake (or another kind of) tensor."""
    return torch.compiler.is_compiling() or type(x) not in _PLAIN


def as_operator(x: Tensor, job: Job, backend: str) -> Tensor:
    """The result of a job as a node of the graph.

    Raises:
        ValueError: The format is not one of `FORMATS`: a graph holds names only.
    """
    if FORMATS.get(job.fmt.name) != job.fmt:
        raise ValueError(f"under torch.compile a format must be one of {', '.join(FORMATS)}, not {job.fmt.name!r}")
    result: Tensor = _fake_quantize(x.detach(), job.fmt.name, job.axis, job.scale_rule, job.saturate, job.amax, backend)
    return result


@torch.library.custom_op("quantscope::fake_quantize", mutates_args=())
def _fake_quantize(
    x: Tensor, fmt: str, axis: int, scale_rule: str, saturate: bool, amax: Tensor | None, backend: str
) -> Tensor:
    from megatron.quantscope.formats.dispatch import fake_quantize

    return fake_quantize(x, fmt, axis=axis, scale_rule=scale_rule, saturate=saturate, amax=amax, backend=backend)


@_fake_quantize.register_fake
def _(x: Tensor, fmt: str, axis: int, scale_rule: str, saturate: bool, amax: Tensor | None, backend: str) -> Tensor:
    return torch.empty_like(x)
