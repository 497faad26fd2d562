"""Flags of saving and loading checkpoints."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_int

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")

CHECKPOINT_FLAGS = FlagGroup(
    "checkpoints",
    (
        Flag(name="--save", metavar="DIR", help="where checkpoints are written"),
        Flag(
            name="--save-interval",
            type=positive_int,
            metavar="N",
            help="write one every N iterations (default: only at the end)",
        ),
        Flag(
            name="--load",
            metavar="DIR",
            help="continue from the latest checkpoint there; an empty DIR is an error unless it is --save's, too",
        ),
        Flag(
            name="--use-checkpoint-args",
            switch=True,
            default=False,
            help="take the model flags from DIR/model.json of --load",
        ),
        Flag(name="--finetune", switch=True, default=False, help="load the weights only and start at iteration 0"),
        Flag(name="--no-load-optim", switch=True, default=False, help="leave the optimizer's state in the checkpoint"),
        Flag(name="--no-load-rng", switch=True, default=False, help="leave the random state in the checkpoint"),
        Flag(name="--no-save-optim", switch=True, default=False, help="write no optimizer state"),
        Flag(name="--no-save-rng", switch=True, default=False, help="write no random state"),
        Flag(
            name="--exit-on-missing-checkpoint",
            switch=True,
            default=False,
            help="an empty --load DIR is an error even if it is --save's, too",
        ),
        Flag(
            name="--ckpt-format",
            default="torch_dist",
            metavar="NAME",
            help="torch_dist (megatron-core's dist_checkpointing)",
            refused="only torch_dist is supported",
        ),
        Flag(
            name="--use-dist-ckpt",
            switch=True,
            default=False,
            help="accepted and without effect: checkpoints are always distributed ones",
        ),
        Flag(
            name="--async-save",
            switch=True,
            default=False,
            help="write checkpoints while training goes on",
        ),
        Flag(
            name="--save-retain-interval",
            type=positive_int,
            metavar="N",
            help="keep the checkpoints of every N-th iteration and the latest one, remove others (default: keep all)",
        ),
        Flag(
            name="--ckpt-step",
            type=non_negative_int,
            metavar="N",
            help="load the checkpoint of iteration N instead of the latest",
        ),
        Flag(
            name="--dist-ckpt-optim-fully-reshardable",
            switch=True,
            default=False,
            help="write the distributed optimizer's state so that it can be loaded under any layout, not only another "
            "data parallel size; gathers it when saving",
        ),
        Flag(
            name="--no-ckpt-fully-parallel-save",
            dest="ckpt_fully_parallel_save",
            switch=True,
            const=False,
            default=True,
            help="let the first data parallel rank write weights alone, instead of all of them a share",
        ),
        Flag(
            name="--ckpt-fully-parallel-save",
            dest="ckpt_fully_parallel_save_deprecated",
            switch=True,
            default=False,
            help="accepted and without effect: it is the default",
        ),
        Flag(
            name="--ckpt-fully-parallel-load",
            switch=True,
            default=False,
            help="share reading among data parallel ranks",
            refused="every rank reads what it needs",
        ),
        Flag(
            name="--ckpt-assume-constant-structure",
            switch=True,
            default=False,
            help="work out once, not at each save, which rank writes what",
        ),
        Flag(
            name="--dist-ckpt-strictness",
            default="assume_ok_unexpected",
            metavar="NAME",
            help="assume_ok_unexpected: what the model needs must be in the checkpoint, what it does not is passed by",
            refused="only assume_ok_unexpected is supported",
        ),
        Flag(
            name="--exit-signal-handler",
            switch=True,
            default=False,
            help="on --exit-signal complete the iteration, save a checkpoint and end with exit code 0",
        ),
        Flag(
            name="--exit-signal",
            choices=EXIT_SIGNALS,
            default="SIGTERM",
            metavar="NAME",
            help=f"the signal of --exit-signal-handler: {', '.join(EXIT_SIGNALS)} (default SIGTERM)",
        ),
        Flag(
            name="--exit-signal-handler-for-dataloader",
            switch=True,
            default=False,
            help="accepted and without effect: with --exit-signal-handler, processes that read data never end by it",
        ),
    ),
)
