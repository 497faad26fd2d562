"""Statistics of CUDA tensors with Triton: one read, no wait; on CPU tensors under TRITON_INTERPRET=1, for tests.

`DeviceStatistics` is for many tensors at a time, as a step of training has them: each leaves a row of figures and, if
wanted, the map of its blocks in one buffer on the device, and one copy brings all of them to the host.

Counts, least and largest element are exact, and so is the map. Sum and sum of squares are sums in float64: for n
elements (a short block counts as a whole one), sum |x| and sum x^2 in place of S,

    |found - exact| <= (n / 2^21 + 40) * 2^-53 * S    but for terms of 2^-106

since n / 2^21 elements go through one lane of one of 2^10 programs of 2^11 lanes each, and fewer than 40 additions
follow. They become `ExactSum`s of these rounded numbers, and merging adds no error to them. The same tensor always
gives the same numbers: nothing depends on the order in which programs run, or on how many run at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import triton
from torch import Tensor

from megatron.quantscope.formats.block_exponents import map_shape
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.formats.exact import ExactSum
from megatron.quantscope.formats.statistics import TensorStatistics
from megatron.quantscope.formats.triton_backend import INTERPRETED, TILE, on_device
from megatron.quantscope.formats.triton_counting import (
    COUNTS,
    FIELDS,
    INF_BIN,
    SUMS,
    count_kernel,
    total_kernel,
)

PROGRAMS = 4 if INTERPRETED else 1 << 10
_BIAS, _LEAST_EXPONENT, _SUBNORMAL_BINS = 127, -149, 23
_ROW_BYTES = 8 * (COUNTS + SUMS)
_ALIGNMENT = 16  # bytes: what Triton takes an address for
_TOTAL_PROGRAMS = COUNTS // 32 + 1
_COUNT_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_TOTAL_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
_WIDENED: Mapping[torch.dtype, torch.dtype] = {
    torch.float8_e4m3fn: torch.bfloat16,
    torch.float8_e5m2: torch.bfloat16,
    torch.bool: torch.bfloat16,
    torch.uint8: torch.bfloat16,
    torch.int8: torch.bfloat16,
    torch.int16: torch.float32,
}
"""Dtypes that another one holds exactly."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, *_WIDENED)
"""What can be measured; float64 and longer integers have no room in a float32."""


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """A tensor as the kernel sees it: `blocks` blocks of 32 in rows, or all of it as one row."""

    blocks: int
    length: int
    row_stride: int
    in_rows: bool

    @property
    def tiles(self) -> int:
        return -(-self.blocks * MX_BLOCK // TILE)

    @property
    def programs(self) -> int:
        return max(1, min(PROGRAMS, self.tiles))


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """What a tensor left on the device, to be read after a transfer.

    Attributes:
        buffer: Number of the transfer that it belongs to.
        start: Of the tensor's bytes in the buffer; the row, then the map.
        count: Elements.
        filled: Lanes of tiles that held no element.
        shape: Of the map; None: there is none.
    """

    buffer: int
    start: int
    count: int
    filled: int
    shape: tuple[int, ...] | None

    def read(self, transfer: Transfer) -> tuple[TensorStatistics, Tensor | None]:
        """The statistics and the map, uint8 on the CPU; waits for the transfer.

        Raises:
            ValueError: It is another transfer than the one after `add`.
        """
        if transfer.number != self.buffer:
            raise ValueError(f"the ticket is of transfer {self.buffer}, not of transfer {transfer.number}")
        held = transfer.wait()
        begin = self.start + _ROW_BYTES
        fields = None if self.shape is None else held[begin : begin + prod(self.shape)].clone().view(self.shape)
        return statistics_of_row(held[self.start : begin], self.count, self.filled), fields


class Transfer:
    """A copy of all that was measured, on its way to the host."""

    def __init__(self, number: int, held: Tensor, done: torch.cuda.Event | None) -> None:
        self.number = number
        self._held, self._done = held, done

    def ready(self) -> bool:
        """Whether it has arrived."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The bytes, once they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._held


class DeviceStatistics:
    """Room on a device for the figures of many tensors, of which one copy brings all to the host.

    Nothing waits but `Transfer.wait`. `add` may run on any stream; tensors may be freed or changed right after it, as
    after any other operation on that stream. Not for more than one thread at a time.
    """

    def __init__(self, device: torch.device | str, capacity_bytes: int) -> None:
        """`device` is a CUDA device or, under TRITON_INTERPRET=1, the CPU; a tensor takes 2.3 KB and its map."""
        self._buffer = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._device = self._buffer.device
        self._used = self._number = 0
        self._on_cuda = self._device.type == "cuda"
        self._side: torch.cuda.Stream | None = None
        if self._on_cuda:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}  # that wrote since the last transfer

    def add(self, tensor: Tensor, blocks: bool = False) -> Ticket | None:
        """Measure a tensor on the device; `blocks`: map its blocks of 32 along the last dimension too.

        Returns:
            What to read after the next transfer; None if the buffer has no room for it.

        Raises:
            TypeError: The dtype is none of `DTYPES`.
        """
        x, grid = _prepared(tensor, blocks)
        shape = map_shape(tensor) if blocks else None
        end = self._used + _ROW_BYTES + (prod(shape) if shape else 0)
        if end > self._buffer.numel():
            return None
        with on_device(self._device):
            self._follow_current_stream()
            _launch(x, grid, self._buffer[self._used : end], blocks)
        filled = grid.tiles * TILE - x.numel()
        ticket = Ticket(buffer=self._number, start=self._used, count=x.numel(), filled=filled, shape=shape)
        self._used = min(-(-end // _ALIGNMENT) * _ALIGNMENT, self._buffer.numel())
        return ticket

    def transfer(self) -> Transfer:
        """Start the copy of all that was added since the last one; then there is room again."""
        number, used = self._number, self._buffer[: self._used]
        self._number, self._used = number + 1, 0
        if self._side is None:
            return Transfer(number, used.clone(), None)
        held = torch.empty(used.numel(), dtype=torch.uint8, pin_memory=True)  # torch keeps such memory for the next
        for stream in self._streams.values():
            self._side.wait_stream(stream)
        self._streams.clear()
        with torch.cuda.stream(self._side):
            held.copy_(used, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._side)
        self._buffer.record_stream(self._side)
        return Transfer(number, held, self._copied)

    def _follow_current_stream(self) -> None:
        """What is added now comes after the copy of what was there before."""
        if not self._on_cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = stream
            if self._copied is not None:
                stream.wait_event(self._copied)


def statistics_of(x: Tensor) -> TensorStatistics:
    """The statistics of one tensor; waits for them."""
    return _measured(x, blocks=False)[0]


def statistics_and_blocks_of(x: Tensor) -> tuple[TensorStatistics, Tensor]:
    """The statistics and the map of one tensor; waits for them. The map stays on the device."""
    statistics, fields = _measured(x, blocks=True)
    return statistics, fields.view(map_shape(x))


def statistics_of_row(row: Tensor, count: int, filled: int) -> TensorStatistics:
    """What a row says, on the CPU: of `count` elements, in tiles with `filled` lanes that held none."""
    counts = row[: 8 * COUNTS].view(torch.int64).tolist()
    total, squares, least, largest = row[8 * COUNTS :].view(torch.float64).tolist()
    subnormal, inf = counts[FIELDS : FIELDS + _SUBNORMAL_BINS], counts[FIELDS + INF_BIN]
    not_finite = counts[FIELDS - 1]
    tiny = {_LEAST_EXPONENT + place: times for place, times in enumerate(subnormal) if times}
    normal = {field - _BIAS: times for field, times in enumerate(counts[1 : FIELDS - 1], start=1) if times}
    any_finite = not_finite < count
    return TensorStatistics(
        count=count,
        zero=counts[0] - sum(subnormal) - filled,
        nan=not_finite - inf,
        inf=inf,
        min=least + 0.0 if any_finite else None,  # -0 is 0
        max=largest + 0.0 if any_finite else None,
        exact_sum=ExactSum.of_float(total),
        exact_squares=ExactSum.of_float(squares),
        exponents=tiny | normal,
    )


def _measured(tensor: Tensor, *, blocks: bool) -> tuple[TensorStatistics, Tensor]:
    x, grid = _prepared(tensor, blocks)
    room = torch.empty(_ROW_BYTES + blocks * prod(map_shape(tensor)), dtype=torch.uint8, device=x.device)
    with on_device(x.device):
        _launch(x, grid, room, blocks)
    row, fields = room[:_ROW_BYTES].cpu(), room[_ROW_BYTES:]
    return statistics_of_row(row, x.numel(), grid.tiles * TILE - x.numel()), fields


def _prepared(tensor: Tensor, blocks: bool) -> tuple[Tensor, _Grid]:
    """The memory to read, and how; a copy on the device where no kernel could read it as it is.

    Raises:
        TypeError: The dtype is none of `DTYPES`.
    """
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"a tensor of {tensor.dtype} can not be measured by Triton: choose from {names}")
    x = tensor.detach()
    x = x.to(_WIDENED.get(x.dtype, x.dtype))
    stride = _row_stride(x)
    if stride is None:
        x = x.contiguous()
        stride = x.shape[-1] if x.dim() else 1
    length = x.shape[-1] if x.dim() else 1
    rows = x.numel() // length if length else 0
    if rows <= 1 or (stride == length and (not blocks or length % MX_BLOCK == 0)):
        whole = triton.cdiv(x.numel(), MX_BLOCK)
        return x, _Grid(blocks=whole, length=x.numel(), row_stride=0, in_rows=False)
    in_row = triton.cdiv(length, MX_BLOCK)
    return x, _Grid(blocks=rows * in_row, length=length, row_stride=stride, in_rows=True)


def _row_stride(x: Tensor) -> int | None:
    """From row to row of the last dimension, if it is the same everywhere; None: it is not, or rows have gaps."""
    if x.is_contiguous():
        return x.shape[-1] if x.dim() else 1
    if x.dim() < 2 or x.stride(-1) != 1:
        return None
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    steps = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    uniform = all(outer == size * inner for (_, outer), (size, inner) in pairwise(steps))
    return steps[-1][1] if steps and uniform else None


def _launch(x: Tensor, grid: _Grid, room: Tensor, blocks: bool) -> None:
    """Let a tensor's row, and its map behind it, be written to `room`."""
    programs = grid.programs
    counts = torch.empty(programs * COUNTS, dtype=torch.int32, device=x.device)
    sums = torch.empty(programs * SUMS, dtype=torch.float64, device=x.device)
    count_kernel[(programs,)](
        x.view(torch.int16) if x.dtype == torch.bfloat16 else x,
        counts,
        sums,
        room[_ROW_BYTES:] if blocks else None,
        grid.blocks,
        grid.length,
        grid.row_stride,
        BLOCKS=TILE // MX_BLOCK,
        BLOCK=MX_BLOCK,
        IN_ROWS=grid.in_rows,
        **_COUNT_OPTIONS,
    )
    row = room[:_ROW_BYTES]
    total_kernel[(_TOTAL_PROGRAMS,)](
        counts,
        sums,
        row[: 8 * COUNTS].view(torch.int64),
        row[8 * COUNTS :].view(torch.float64),
        programs,
        **_TOTAL_OPTIONS,
    )
