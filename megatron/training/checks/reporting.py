"""Profiles that could not begin, and reports that have no place to go."""

from __future__ import annotations

from megatron.training.checks.table import Check

REPORTING_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.profile and a.profile_step_end <= a.profile_step_start,
        "--profile-step-end {profile_step_end} is not above --profile-step-start {profile_step_start}",
    ),
    (
        lambda a: a.profile and max(a.profile_ranks) >= a.world_size,
        "--profile-ranks {profile_ranks}: there are {world_size} ranks, counted from 0",
    ),
    (
        lambda a: a.profile and a.use_pytorch_profiler and not (a.tensorboard_dir or a.save),
        "--use-pytorch-profiler writes its trace to --tensorboard-dir or --save: give one",
    ),
    (
        lambda a: a.log_progress and not a.save,
        "--log-progress needs --save",
    ),
)
