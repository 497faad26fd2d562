"""Flags of checkpoints that do not go together."""

from __future__ import annotations

from megatron.training.checks.table import Check

CHECKPOINT_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.save_interval and not a.save,
        "--save-interval needs --save",
    ),
    (
        lambda a: a.ckpt_step is not None and not a.load,
        "--ckpt-step {ckpt_step} says which checkpoint to load, and needs --load",
    ),
    (
        lambda a: a.save_retain_interval and a.save_interval and a.save_retain_interval % a.save_interval,
        "--save-retain-interval {save_retain_interval} is not a multiple of --save-interval {save_interval}",
    ),
    (
        lambda a: a.dist_ckpt_optim_fully_reshardable and not a.use_distributed_optimizer,
        "--dist-ckpt-optim-fully-reshardable is about the state of --use-distributed-optimizer; any other optimizer's "
        "can be loaded under any layout",
    ),
)
