"""How many rows, files and bytes a capture will have, computed from the model's sizes before anything runs.

A row is one tensor of one GEMM call (a line of the manifest), a file is what lies on the disk. In a transformer layer
of one micro-batch, T tokens on the rank, element size e:

    4 linears (K -> N)   input T*K, weight N*K, output T*N, grad_output T*N, grad_input T*K, grad_weight N*K
                         and the weight once more before the backward: a row that refers to the first one's file
    attention            query, output, grad_output, grad_query: T*heads*channels
                         key, value, grad_key, grad_value: T*groups*channels

so 4 * 7 + 8 = 36 rows and 4 * 6 + 8 = 32 files a layer; for SmolLM2-135M (30 layers) 1,080 rows and 960 files. A weight
is written once in an optimizer step: a further micro-batch of the same iteration has 36 rows and 28 files a layer.

Tensor parallelism over P ranks splits some tensors, and leaves others whole on every rank, which then each write their
own: a column-parallel linear's input and grad_input, a row-parallel one's output and grad_output. With sequence
parallelism the gathered ones (input, grad_output) are kept by the first rank of the group alone. Data parallelism over
D ranks multiplies everything by D; context parallelism over C ranks does so by C, with T / C tokens on each. Pipeline
parallelism changes no total.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

FILE_OVERHEAD_BYTES = 2_600  # measured: the archive of torch.save, and the metadata
MANIFEST_LINE_BYTES = 1_600  # measured
TWO_BYTES, FOUR_BYTES = 2, 4
GATE_AND_UP = 2  # a gated MLP's first linear makes both at once


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One captured tensor of a layer, over all ranks of a tensor-parallel group.

    Attributes:
        elements: Of all its copies.
        copies: Ranks that each keep one (a share, a summand, or the same whole).
        weight: True for the weight, which is written once in an optimizer step.
        reference: True for a row that refers to another row's file.
    """

    elements: int
    copies: int
    weight: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Total:
    """Rows, files and bytes; `payload` is the tensors' own bytes, without the files' headers."""

    rows: int = 0
    files: int = 0
    payload: int = 0

    def __add__(self, other: Total) -> Total:
        return Total(self.rows + other.rows, self.files + other.files, self.payload + other.payload)

    def __mul__(self, times: int) -> Total:
        return Total(self.rows * times, self.files * times, self.payload * times)

    @property
    def on_disk(self) -> int:
        """Bytes that will be taken, within a percent or two for small tensors."""
        return self.payload + self.files * FILE_OVERHEAD_BYTES + self.rows * MANIFEST_LINE_BYTES


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will keep.

    Attributes:
        first: The first micro-batch of an iteration, over all ranks.
        further: Every further micro-batch of the same iteration.
        micro_batches: Kept in each collected iteration.
        iterations: That are collected.
        seq_length, micro_batch_size, data_parallel_size: As the trainer's; the tokens of a micro-batch follow.
    """

    first: Total
    further: Total
    micro_batches: int
    iterations: int
    seq_length: int
    micro_batch_size: int
    data_parallel_size: int

    @property
    def total(self) -> Total:
        """The whole run."""
        return (self.first + self.further * (self.micro_batches - 1)) * self.iterations

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, over the data-parallel ranks."""
        return self.seq_length * self.micro_batch_size * self.data_parallel_size


def plan(args: Namespace, *, iterations: int, micro_batches: int) -> Plan:
    """What collecting from the trainer's checked arguments will keep, if no filter leaves tensors out."""
    times = args.num_layers * args.data_parallel_size * args.context_parallel_size
    rows = list(_layer(args))
    return Plan(
        first=_sum(rows, args, weights=True) * times,
        further=_sum(rows, args, weights=False) * times,
        micro_batches=micro_batches,
        iterations=iterations,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
    )


def _sum(rows: list[Captured], args: Namespace, *, weights: bool) -> Total:
    element = TWO_BYTES if args.bf16 or args.fp16 else FOUR_BYTES
    files = [row for row in rows if not row.reference and (weights or not row.weight)]
    return Total(
        rows=sum(row.copies for row in rows),
        files=sum(row.copies for row in files),
        payload=sum(row.elements for row in files) * element,
    )


def _tokens(args: Namespace) -> int:
    """Tokens of a micro-batch on one rank; context parallel ranks share each sequence."""
    return int(args.seq_length // args.context_parallel_size * args.micro_batch_size)


def _layer(args: Namespace) -> Iterator[Captured]:
    """Every row of one layer and one micro-batch."""
    hidden, ffn = args.hidden_size, args.ffn_hidden_size
    query = args.num_attention_heads * args.kv_channels
    key = args.num_query_groups * args.kv_channels
    yield from _linear(args, hidden, query + 2 * key, column=True)
    yield from _linear(args, query, hidden, column=False)
    yield from _linear(args, hidden, ffn * (GATE_AND_UP if args.swiglu else 1), column=True)
    yield from _linear(args, ffn, hidden, column=False)
    tokens = _tokens(args)
    for width in (query, query, query, query, key, key, key, key):
        yield Captured(elements=tokens * width, copies=args.tensor_model_parallel_size)


def _linear(args: Namespace, inputs: int, outputs: int, *, column: bool) -> Iterator[Captured]:
    """The seven rows of a linear: column-parallel (outputs are split) or row-parallel (inputs are)."""
    ranks = args.tensor_model_parallel_size
    gathered = 1 if args.sequence_parallel else ranks
    tokens = _tokens(args)
    x, y, w = tokens * inputs, tokens * outputs, inputs * outputs
    whole_x, whole_y = (x, y) if column else (y, x)  # the side that every rank sees whole, and the split side
    yield Captured(elements=whole_x * gathered, copies=gathered)  # input, or grad_output of a row-parallel one
    yield Captured(elements=whole_x * ranks, copies=ranks)  # grad_input, or output: a summand on every rank
    yield Captured(elements=whole_y, copies=ranks)
    yield Captured(elements=whole_y, copies=ranks)
    yield Captured(elements=w, copies=ranks)  # grad_weight
    yield Captured(elements=w, copies=ranks, weight=True)
    yield Captured(elements=w, copies=ranks, weight=True, reference=True)
