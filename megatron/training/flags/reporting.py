"""Flags of what is printed, logged, evaluated and measured while training runs."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_int

NO_WANDB = "only TensorBoard is supported (--tensorboard-dir)"
TIMING_LOG_OPTIONS = ("max", "minmax", "all")

EVALUATION_FLAGS = FlagGroup(
    "evaluation",
    (
        Flag(
            name="--eval-iters",
            type=non_negative_int,
            default=100,
            metavar="N",
            help="batches of one evaluation; 0: never evaluate (default 100)",
        ),
        Flag(
            name="--eval-interval",
            type=positive_int,
            default=1000,
            metavar="N",
            help="iterations between evaluations (default 1000)",
        ),
        Flag(name="--skip-train", switch=True, default=False, help="evaluate only"),
    ),
)

REPORTING_FLAGS = FlagGroup(
    "logging",
    (
        Flag(
            name="--log-interval",
            type=positive_int,
            default=100,
            metavar="N",
            help="iterations between log lines; the last iteration is always logged (default 100)",
        ),
        Flag(name="--log-throughput", switch=True, default=False, help="add TFLOP/s per rank to the log line"),
        Flag(name="--log-num-zeros-in-grad", switch=True, default=False, help="add the number of zero gradients"),
        Flag(name="--log-params-norm", switch=True, default=False, help="add the norm of all parameters"),
        Flag(
            name="--log-progress",
            switch=True,
            default=False,
            help="append a line for each start and each checkpoint to progress.txt in --save",
        ),
        Flag(
            name="--timing-log-level",
            type=int,
            choices=(0, 1, 2),
            default=0,
            help="print what takes the time of an iteration: 1 forward-backward and optimizer, 2 their parts (default "
            "0: whole iterations only)",
        ),
        Flag(
            name="--timing-log-option",
            choices=TIMING_LOG_OPTIONS,
            default="minmax",
            help="these times over the ranks: the longest, both ends, or every rank's (default minmax)",
        ),
        Flag(
            name="--no-barrier-with-level-1-timing",
            dest="barrier_with_L1_time",
            switch=True,
            const=False,
            default=True,
            help="do not make ranks wait for each other before --timing-log-level 1 takes a time",
        ),
        Flag(
            name="--logging-level",
            type=int,
            choices=(0, 10, 20, 30, 40, 50),
            help="level of Python's logging: 10 debug, 20 info, 30 warning (default), 40 error",
        ),
        Flag(name="--tensorboard-dir", metavar="DIR", help="write scalars for TensorBoard there"),
        Flag(
            name="--tensorboard-log-interval",
            type=positive_int,
            default=1,
            metavar="N",
            help="iterations between scalars (default 1)",
        ),
        Flag(
            name="--tensorboard-queue-size",
            type=positive_int,
            default=1000,
            metavar="N",
            help="scalars kept back before they are written (default 1000)",
        ),
        Flag(
            name="--log-timers-to-tensorboard",
            switch=True,
            default=False,
            help="write the times of --timing-log-level there",
        ),
        Flag(
            name="--log-memory-to-tensorboard",
            switch=True,
            default=False,
            help="write the memory there: of the GPU, or without GPU of the process",
        ),
        Flag(
            name="--log-batch-size-to-tensorboard",
            switch=True,
            default=False,
            help="accepted and without effect: the batch size is always written",
        ),
        Flag(
            name="--log-validation-ppl-to-tensorboard",
            switch=True,
            default=False,
            help="accepted and without effect: the perplexity is always written",
        ),
        Flag(
            name="--log-world-size-to-tensorboard",
            switch=True,
            default=False,
            help="write the number of ranks there",
        ),
        Flag(
            name="--no-log-loss-scale-to-tensorboard",
            dest="log_loss_scale_to_tensorboard",
            switch=True,
            const=False,
            default=True,
            help="leave the loss scale out",
        ),
        Flag(name="--wandb-project", metavar="NAME", help="Weights & Biases", refused=NO_WANDB),
        Flag(
            name="--no-one-logger",
            dest="enable_one_logger",
            switch=True,
            const=False,
            default=True,
            help="accepted and without effect: nothing is sent anywhere",
        ),
        Flag(name="--manual-gc", switch=True, default=False, help="collect garbage only when told"),
        Flag(
            name="--manual-gc-interval",
            type=non_negative_int,
            default=0,
            metavar="N",
            help="with --manual-gc: every N iterations; 0: never (default 0)",
        ),
        Flag(
            name="--empty-unused-memory-level",
            type=int,
            choices=(0, 1, 2),
            default=0,
            help="return unused GPU memory: 1 before each optimizer step, 2 also after it (default 0)",
        ),
        Flag(
            name="--no-manual-gc-eval",
            dest="manual_gc_eval",
            switch=True,
            const=False,
            default=True,
            help="with --manual-gc: do not collect before and after each evaluation",
        ),
        Flag(
            name="--train-sync-interval",
            type=positive_int,
            metavar="N",
            help="accepted and without effect: GPU and CPU wait for each other in every iteration",
        ),
        Flag(
            name="--check-weight-hash-across-dp-replicas-interval",
            type=positive_int,
            metavar="N",
            help="every N iterations, stop when the data parallel ranks do not have the same weights",
        ),
        Flag(
            name="--rerun-mode",
            default="disabled",
            metavar="NAME",
            help="disabled: no iteration is run again to see whether a result repeats",
            refused="nothing is run again to look for faulty hardware; only disabled is supported",
        ),
    ),
)

PROFILING_FLAGS = FlagGroup(
    "profiling",
    (
        Flag(
            name="--profile",
            switch=True,
            default=False,
            help="profile some iterations: with a GPU for nsys (nsys profile --capture-range=cudaProfilerApi), without "
            "by torch's profiler",
        ),
        Flag(
            name="--use-pytorch-profiler",
            switch=True,
            default=False,
            help="with --profile: by torch's profiler, a trace for each profiled rank in --tensorboard-dir or --save",
        ),
        Flag(
            name="--profile-step-start",
            type=non_negative_int,
            default=10,
            metavar="N",
            help="iterations of this start before the profile begins; without effect unless --profile is given "
            "(default 10)",
        ),
        Flag(
            name="--profile-step-end",
            type=non_negative_int,
            default=12,
            metavar="N",
            help="... and before it ends; without effect unless --profile is given (default 12)",
        ),
        Flag(
            name="--profile-ranks",
            type=non_negative_int,
            nargs="+",
            default=[0],
            metavar="RANK",
            help="profiled ranks; without effect unless --profile is given (default 0)",
        ),
        Flag(
            name="--pytorch-profiler-collect-shapes",
            switch=True,
            default=False,
            help="with torch's profiler: the shapes of operands too",
        ),
        Flag(
            name="--pytorch-profiler-collect-callstack",
            switch=True,
            default=False,
            help="with torch's profiler: the lines of code that called, too",
        ),
        Flag(
            name="--record-memory-history",
            switch=True,
            default=False,
            help="record every allocation of GPU memory, for pytorch.org/memory_viz",
        ),
        Flag(
            name="--memory-snapshot-path",
            default="snapshot.pickle",
            metavar="FILE",
            help="where --record-memory-history writes, on the first and the last rank (default snapshot.pickle)",
        ),
    ),
)
