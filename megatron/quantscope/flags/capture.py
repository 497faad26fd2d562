"""Flags that say which tensors are kept, where, and for how long (docs/capture.md)."""

from __future__ import annotations

from megatron.quantscope.flags.table import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_float, positive_int

DEFAULT_DIRECTORY = "./enhanced_tensor_logs"
DEFAULT_BUDGET_GB = 50.0
DEFAULT_HOST_MEMORY_GB = 2.0
SAVE_MODES = ("tensors", "statistics", "both")
SAVE_FORMATS = ("pt", "segment")
ON_ERROR = ("stop", "continue")
POINTS = ("attention_probs", "residual", "norm", "activation", "logits")

CAPTURE_FLAGS = FlagGroup(
    "tensor capture",
    (
        Flag(
            name="--save-tensors",
            switch=True,
            help="keep the tensors before and after each linear and attention GEMM (environment TENSOR_SAVE_ENABLED)",
        ),
        Flag(
            name="--tensor-save-dir",
            metavar="DIR",
            help=f"where to keep them (default {DEFAULT_DIRECTORY}; environment TENSOR_SAVE_DIR)",
        ),
        Flag(
            name="--control-iter",
            type=non_negative_int,
            default=1,
            metavar="N",
            help="N iterations are collected, in each the first M micro-batches (--collect-micro-batches), then "
            "training stops by itself, after the iteration is complete; 0 = never stop (default 1)",
        ),
        Flag(
            name="--collect-micro-batches",
            type=positive_int,
            default=1,
            metavar="M",
            help="micro-batches kept in each collected iteration: --control-iter 3 keeps 3, "
            "--control-iter 3 --collect-micro-batches 2 keeps 6 (default 1)",
        ),
        Flag(
            name="--tensor-filter",
            nargs="+",
            metavar="KEY=VALUES",
            help="keep only what matches every given key: layers=0-3,10 modules=*linear_fc2 tensors=input,weight "
            "operations=forward ranks=0 (modules are shell patterns; naming output_layer keeps the LM head)",
        ),
        Flag(
            name="--tensor-schedule",
            metavar="START:EVERY:UNTIL",
            help="collect every EVERY-th iteration from START (counted from 0 at this start) before UNTIL, each part "
            "may be left out (default 0:1: every iteration)",
        ),
        Flag(
            name="--tensor-budget-gb",
            type=positive_float,
            default=DEFAULT_BUDGET_GB,
            metavar="GB",
            help=f"stop collecting before this run has written more (default {DEFAULT_BUDGET_GB:g})",
        ),
        Flag(
            name="--tensor-host-memory-gb",
            type=positive_float,
            default=DEFAULT_HOST_MEMORY_GB,
            metavar="GB",
            help=f"bound of the memory that waits to be written (default {DEFAULT_HOST_MEMORY_GB:g})",
        ),
        Flag(
            name="--tensor-on-error",
            choices=ON_ERROR,
            default="continue",
            help="what training does when a tensor can not be saved: stop, or continue and stop collecting (default "
            "continue)",
        ),
        Flag(
            name="--tensor-save-mode",
            choices=SAVE_MODES,
            default="tensors",
            help="keep tensors, their statistics, or both (default tensors)",
        ),
        Flag(
            name="--tensor-save-format",
            choices=SAVE_FORMATS,
            default="pt",
            help="pt: one self-contained file a tensor; segment: one file a rank and iteration (default pt)",
        ),
        Flag(
            name="--tensor-points",
            nargs="+",
            choices=POINTS,
            metavar="POINT",
            help=f"keep at further points too: {', '.join(POINTS)}",
        ),
        Flag(
            name="--tensor-dry-run",
            switch=True,
            help="print the files and bytes an iteration would take, and stop",
        ),
        Flag(
            name="--tensor-fsync",
            switch=True,
            help="force every iteration to the disk before it is committed, so that a power cut does not take it back",
        ),
        Flag(
            name="--tensor-check-interference",
            switch=True,
            help="train the same steps with and without capture and compare the results bitwise",
        ),
    ),
)
