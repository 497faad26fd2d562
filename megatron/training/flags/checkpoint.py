"""Flags of saving and loading checkpoints."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import positive_int

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
            refused="asynchronous saving is not supported yet",
        ),
    ),
)
