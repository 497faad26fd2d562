"""Combinations of flags that can not be, one table a topic (`table` says what a row is)."""

from megatron.training.checks.checkpoint import CHECKPOINT_CHECKS
from megatron.training.checks.data import DATA_CHECKS
from megatron.training.checks.experts import EXPERT_CHECKS
from megatron.training.checks.kernels import KERNEL_CHECKS, QUANTIZED_KERNEL_CHECKS
from megatron.training.checks.machine import MACHINE_CHECKS
from megatron.training.checks.model import MODEL_CHECKS
from megatron.training.checks.parallelism import PARALLELISM_CHECKS
from megatron.training.checks.reporting import REPORTING_CHECKS
from megatron.training.checks.schedule import SCHEDULE_CHECKS
from megatron.training.checks.table import Check, check

__all__ = [
    "CHECKPOINT_CHECKS",
    "DATA_CHECKS",
    "EXPERT_CHECKS",
    "KERNEL_CHECKS",
    "MACHINE_CHECKS",
    "MODEL_CHECKS",
    "PARALLELISM_CHECKS",
    "QUANTIZED_KERNEL_CHECKS",
    "REPORTING_CHECKS",
    "SCHEDULE_CHECKS",
    "Check",
    "check",
]
