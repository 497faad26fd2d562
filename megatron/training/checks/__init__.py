"""Combinations of flags that can not be, one table a topic (`table` says what a row is)."""

from megatron.training.checks.data import DATA_CHECKS
from megatron.training.checks.kernels import KERNEL_CHECKS
from megatron.training.checks.model import MODEL_CHECKS
from megatron.training.checks.parallelism import PARALLELISM_CHECKS
from megatron.training.checks.schedule import SCHEDULE_CHECKS
from megatron.training.checks.table import Check, check

__all__ = [
    "DATA_CHECKS",
    "KERNEL_CHECKS",
    "MODEL_CHECKS",
    "PARALLELISM_CHECKS",
    "SCHEDULE_CHECKS",
    "Check",
    "check",
]
