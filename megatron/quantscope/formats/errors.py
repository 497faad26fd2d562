"""What a format does to a tensor, in numbers that add up, from one read of it.

    underflow   elements that are not zero and become zero
    saturated   other elements beyond the largest value of their block, which become that value
    lost        finite elements that become Inf or NaN
    dead        blocks that are not all zeros and become all zeros
    error       sum of (x - q(x))^2 over the elements that are finite before and after
    SQNR        10 log10(sum x^2 / error), in dB

q is the format itself, in float32: the rounding of its result to x's dtype is no part of it, and x - q(x) is a float32
difference, which is exact unless an element is far beyond the largest value.

All of it is known for each block too, which shows where in a tensor a format fails. Formats without blocks are looked
at in blocks of 32. The error of a block is a sum in float64; those of blocks add up without rounding, so shards,
micro-batches and machines give one number in whatever order they come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.quantscope.formats import slabs, torch_backend
from megatron.quantscope.formats.backends import AUTO, BACKENDS
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.formats.damage import FormatDamage
from megatron.quantscope.formats.exact import ExactSum
from megatron.quantscope.formats.job import Job, make_job
from megatron.quantscope.formats.measuring import plain_statistics
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.statistics import TensorStatistics, merge, sqnr_db

_SUMS = 8  # of a block: element i goes to sum i % 8, and they are added in pairs, as in cpp/errors.h
_ROUNDING_SLACK = 1.0 + 2.0**-20  # x * scale may come out this much above max where amax is put onto it
_DEAD = "dead"
_FIGURES: Mapping[str, torch.dtype] = {
    "amax": torch.float32,
    "error": torch.float64,
    "signal": torch.float64,
    "underflow": torch.uint8,
    "saturated": torch.uint8,
    "lost": torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class BlockFigures:
    """Figures of every block: x's shape with the axis replaced by the number of blocks.

    Attributes:
        amax: Largest magnitude, float32.
        error: Sum of squared errors, float64.
        signal: Sum of squares of the finite elements, float64.
        underflow, saturated, lost: Elements, uint8.
    """

    amax: Tensor
    error: Tensor
    signal: Tensor
    underflow: Tensor
    saturated: Tensor
    lost: Tensor


@dataclass(frozen=True, kw_only=True)
class FormatStatistics(FormatDamage):
    """What a tensor holds and what a format does to it; mergeable but for the figures of blocks.

    Attributes:
        tensor: Statistics of the tensor.
        blocks: Figures of single blocks, if they were asked for.
    """

    tensor: TensorStatistics
    blocks: BlockFigures | None = None

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise; see the function of this name."""
        return sqnr_db(self.tensor.sum_squares, self.error_squares, self.lost)

    def __add__(self, other: FormatStatistics) -> FormatStatistics:
        """Of both tensors together, without the figures of blocks."""
        return FormatStatistics(
            tensor=merge(self.tensor, other.tensor),
            underflow=self.underflow + other.underflow,
            saturated=self.saturated + other.saturated,
            lost=self.lost + other.lost,
            dead_blocks=self.dead_blocks + other.dead_blocks,
            error=self.error + other.error,
        )


def measure_format(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    scale_rule: str = "floor",
    saturate: bool | None = None,
    amax: Tensor | None = None,
    blocks: bool = False,
    backend: str = AUTO,
) -> FormatStatistics:
    """The statistics of a tensor and what quantising it does.

    Args:
        x: As of `fake_quantize`.
        fmt: As of `fake_quantize`, and so
        axis: this,
        scale_rule: this,
        saturate: this,
        amax: and this.
        blocks: Also give the figures of every block.
        backend: `auto`, `cpp` or `torch`.

    Raises:
        TypeError: x is not of a floating-point dtype that is supported.
        ValueError: Any other argument is not allowed; the message says what is.
    """
    job = make_job(x, fmt, axis=axis, scale_rule=scale_rule, saturate=saturate, amax=amax)
    use_cpp = _use_cpp(x, (job,), backend)
    x, block = _dense(x), _block_of(job)
    figures = {name: slabs.empty_scales(x, job.axis, block, kind) for name, kind in _FIGURES.items()} if blocks else {}
    record = BlockFigures(**figures) if blocks else None
    if not x.numel():
        return FormatStatistics(tensor=TensorStatistics(exponents={}), blocks=record)
    if use_cpp:
        from megatron.quantscope.formats.cpp_measure import damage_of

        statistics, (damage,) = damage_of(x, (job,), block, figures, measured=True)
        assert statistics is not None
    else:
        statistics, damage = plain_statistics(x), _damage(x, job, block, figures)
    return FormatStatistics(tensor=statistics, blocks=record, **vars(damage))


def measure_formats(
    x: Tensor, wanted: Sequence[tuple[str | Format, str]], *, axis: int = -1, backend: str = AUTO
) -> list[FormatDamage]:
    """What many formats do to a tensor; those with E8M0 scales are tried in one read of it.

    Args:
        x: As of `fake_quantize`.
        wanted: Formats, each with its scale rule.
        axis: As of `fake_quantize`.
        backend: `auto`, `cpp` or `torch`.

    Raises:
        TypeError: x is not of a floating-point dtype that is supported.
        ValueError: Any other argument is not allowed; the message says what is.
    """
    jobs = [make_job(x, fmt, axis=axis, scale_rule=rule, saturate=None, amax=None) for fmt, rule in wanted]
    use_cpp = _use_cpp(x, jobs, backend)
    x = _dense(x)
    found: dict[int, FormatDamage] = {}
    for places in _together(jobs):
        block = _block_of(jobs[places[0]])
        if not x.numel():
            found |= dict.fromkeys(places, FormatDamage())
        elif use_cpp:
            from megatron.quantscope.formats.cpp_measure import damage_of

            _, damages = damage_of(x, [jobs[place] for place in places], block, {}, measured=False)
            found |= dict(zip(places, damages, strict=True))
        else:
            found |= {place: _damage(x, jobs[place], block, {}) for place in places}
    return [found[place] for place in range(len(jobs))]


def _together(jobs: Sequence[Job]) -> list[list[int]]:
    """The places of jobs that one read serves: those with E8M0 scales and blocks of one size, and any other alone."""
    groups: dict[object, list[int]] = {}
    for place, job in enumerate(jobs):
        groups.setdefault(job.fmt.block if job.fmt.scale == "e8m0" else (place,), []).append(place)
    return list(groups.values())


def _dense(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.unsqueeze(0) if x.dim() == 0 else x
    return x if slabs.is_dense(x) else x.contiguous()


def _block_of(job: Job) -> int:
    block = job.fmt.block or MX_BLOCK
    if block > torch.iinfo(torch.uint8).max:
        raise ValueError(f"{job.fmt.name} has blocks of {block}: figures of more than 255 elements have no room")
    return block


def _use_cpp(x: Tensor, jobs: Sequence[Job], backend: str) -> bool:
    if backend not in (AUTO, "cpp", "torch"):
        raise ValueError(f"backend {backend!r} does not measure: choose auto, cpp or torch")
    cpp = BACKENDS["cpp"]
    lacks = cpp.lacks()
    able = lacks is None and x.dtype != torch.float64 and all(cpp.takes(x, job) for job in jobs)
    if backend == "cpp" and not able:
        raise ValueError(f"backend 'cpp' can not measure {x.dtype} on {x.device}: {lacks or cpp.needs}")
    return able and backend != "torch"


def _damage(x: Tensor, job: Job, block: int, figures: Mapping[str, Tensor]) -> FormatDamage:
    """The same with eager torch; fills `figures`, if there are any."""
    kinds = dict(_FIGURES) | {_DEAD: torch.uint8}
    room = {name: figures.get(name, slabs.empty_scales(x, job.axis, block, kind)) for name, kind in kinds.items()}
    _fill(x, job, block, room)
    return FormatDamage(
        underflow=int(room["underflow"].sum()),
        saturated=int(room["saturated"].sum()),
        lost=int(room["lost"].sum()),
        dead_blocks=int(room[_DEAD].sum()),
        error=ExactSum.of(slabs.flat(room["error"]).cpu().numpy()),
    )


def _fill(x: Tensor, job: Job, block: int, figures: Mapping[str, Tensor]) -> None:
    """The figures of all blocks with eager torch."""
    views = {name: slabs.scale_views(figure, x, job.axis, block) for name, figure in figures.items()}
    step = torch_backend.step_for(x, job)
    for number, view in enumerate(slabs.blocked_views(x, job.axis, block)):
        for index, magnitude, signed, scale in torch_backend.elements(view, step):
            top = torch.full((), job.fmt.max, dtype=torch.float32, device=x.device)
            if scale.factor is not None:
                magnitude.mul_(scale.factor)
                top = scale.factor * job.fmt.max * (_ROUNDING_SLACK if job.fmt.has_tensor_scale else 1.0)
            if scale.bad is not None:
                magnitude.masked_fill_(scale.bad, math.nan)
            for name, figure in _compare(signed, torch.copysign(magnitude, signed), top).items():
                views[name][number][index].copy_(figure)


def _compare(x: Tensor, y: Tensor, top: Tensor) -> dict[str, Tensor]:
    """The figures of the blocks [outer, blocks, block, inner] of x that became y, [outer, blocks, 1, inner]."""
    finite = torch.isfinite(x)
    both = finite & torch.isfinite(y)
    magnitude = x.abs()
    marks = {
        "underflow": both & (y == 0) & (x != 0),
        "saturated": both & (magnitude > top) & (y != 0),
        "lost": finite & ~both,
    }
    counts = {name: mark.sum(dim=slabs.BLOCK_DIM, keepdim=True) for name, mark in marks.items()}
    return counts | {
        "amax": _amax(magnitude),
        _DEAD: (_amax(magnitude) > 0) & (_amax(y.abs()) == 0),
        "error": _energy(torch.where(both, x - y, 0.0)),
        "signal": _energy(torch.where(finite, x, 0.0)),
    }


def _amax(magnitude: Tensor) -> Tensor:
    """Of each block; NaN where there is one."""
    return magnitude.view(torch.int32).amax(dim=slabs.BLOCK_DIM, keepdim=True).view(torch.float32)


def _energy(values: Tensor) -> Tensor:
    """Sum of the squares of float32 over a block, float64, in the order that cpp/errors.h has too."""
    squares = values.double().square().movedim(slabs.BLOCK_DIM, -1)
    squares = torch.nn.functional.pad(squares, (0, -squares.shape[-1] % _SUMS))
    sums = torch.zeros_like(squares[..., :_SUMS])
    for part in torch.split(squares, _SUMS, dim=-1):
        sums += part
    s = sums.unbind(-1)
    total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
    return total.unsqueeze(slabs.BLOCK_DIM)
