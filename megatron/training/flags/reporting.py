"""Flags of what is printed, logged, evaluated and measured while training runs."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_int

PROFILING = "profiling is not supported yet; run under the profiler of your choice instead"

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
        Flag(
            name="--log-params-norm",
            switch=True,
            default=False,
            help="add the norm of the parameters",
            refused="the norm of the parameters is not logged yet",
        ),
        Flag(name="--log-progress", switch=True, default=False, help="accepted and without effect"),
        Flag(
            name="--timing-log-level",
            type=non_negative_int,
            default=0,
            metavar="N",
            help="accepted and without effect: only whole iterations are timed",
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
            name="--wandb-project",
            metavar="NAME",
            help="Weights & Biases",
            refused="only TensorBoard is supported (--tensorboard-dir)",
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
        Flag(name="--profile", switch=True, default=False, help="profile some iterations", refused=PROFILING),
        Flag(name="--use-pytorch-profiler", switch=True, default=False, help="by torch's profiler", refused=PROFILING),
        Flag(
            name="--profile-step-start",
            type=non_negative_int,
            default=10,
            metavar="N",
            help="first profiled iteration; without effect unless --profile is given (default 10)",
        ),
        Flag(
            name="--profile-step-end",
            type=non_negative_int,
            default=12,
            metavar="N",
            help="end of the profile; without effect unless --profile is given (default 12)",
        ),
        Flag(
            name="--profile-ranks",
            type=non_negative_int,
            nargs="+",
            default=[0],
            metavar="RANK",
            help="profiled ranks; without effect unless --profile is given (default 0)",
        ),
    ),
)
