"""Flags that say in which precision the model runs, and where its randomness starts."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_float, positive_int

NUMERICS_FLAGS = FlagGroup(
    "precision and randomness",
    (
        Flag(
            name="--bf16", switch=True, default=False, help="parameters and activations in bfloat16 (default: float32)"
        ),
        Flag(name="--fp16", switch=True, default=False, help="in float16, with loss scaling"),
        Flag(
            name="--loss-scale",
            type=positive_float,
            metavar="X",
            help="constant loss scale for --fp16 (default: adapted while training)",
        ),
        Flag(
            name="--initial-loss-scale",
            type=positive_float,
            default=2.0**32,
            metavar="X",
            help="where the adapted loss scale starts (default 2^32)",
        ),
        Flag(
            name="--min-loss-scale",
            type=positive_float,
            default=1.0,
            metavar="X",
            help="its lower bound (default 1)",
        ),
        Flag(
            name="--loss-scale-window",
            type=positive_int,
            default=1000,
            metavar="N",
            help="good iterations before it grows (default 1000)",
        ),
        Flag(
            name="--hysteresis",
            type=positive_int,
            default=2,
            metavar="N",
            help="bad iterations before it shrinks (default 2)",
        ),
        Flag(
            name="--attention-softmax-in-fp32",
            switch=True,
            default=False,
            help="softmax of the attention scores in float32",
        ),
        Flag(
            name="--accumulate-allreduce-grads-in-fp32",
            switch=True,
            default=False,
            help="accumulate and reduce gradients in float32 (the default with --bf16)",
        ),
        Flag(
            name="--grad-reduce-in-bf16",
            switch=True,
            default=False,
            help="accumulate and reduce gradients in the parameters' precision",
        ),
        Flag(
            name="--seed",
            type=non_negative_int,
            default=1234,
            metavar="N",
            help="start of every random number: weights, data order, dropout (default 1234)",
        ),
        Flag(
            name="--data-parallel-random-init",
            switch=True,
            default=False,
            help="other initial weights on each data parallel rank",
        ),
        Flag(
            name="--use-cpu-initialization",
            switch=True,
            default=False,
            help="initial weights from the CPU's generator: the same for any tensor parallel size (always without GPU)",
        ),
        Flag(
            name="--deterministic-mode",
            switch=True,
            default=False,
            help="deterministic kernels only",
        ),
    ),
)
