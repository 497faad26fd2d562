"""What the user asked of capture: flag before environment before default, each value checked once, here.

| setting | flag | environment | default |
|---|---|---|---|
| on or off | `--save-tensors` | TENSOR_SAVE_ENABLED | off |
| directory | `--tensor-save-dir` | TENSOR_SAVE_DIR | ./enhanced_tensor_logs |

The flags' argparse default is None, so that an absent flag can be told from one that was given; `write_back` puts the
resolved values where later code looks for them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.errors import CaptureUsageError
from megatron.quantscope.capture.filter import TensorFilter
from megatron.quantscope.capture.schedule import Schedule
from megatron.quantscope.flags.capture import (
    CAPTURE_FLAGS,
    DEFAULT_BUDGET_GB,
    DEFAULT_DIRECTORY,
    DEFAULT_HOST_MEMORY_GB,
)
from megatron.quantscope.flags.table import Flag

ENABLED_VARIABLE = "TENSOR_SAVE_ENABLED"
DIRECTORY_VARIABLE = "TENSOR_SAVE_DIR"
BYTES_PER_GB = 10**9

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """The resolved settings of one run.

    Attributes:
        enabled: Whether tensors are kept at all.
        directory: The capture root; type folders are made below it.
        control_iter: Iterations to collect before training stops by itself; 0: never stop.
        collect_micro_batches: Micro-batches kept in each collected iteration.
        filter: Which tensors are kept.
        schedule: Which iterations are collected.
        budget_bytes: Bytes that this run, all its ranks together, may write.
        host_memory_bytes: Bytes of copied tensors that may wait to be written, a process.
        stop_on_error: Whether training stops when a tensor can not be saved; otherwise only collecting does.
        mode: "tensors", "statistics" or "both".
        save_format: "pt" or "segment".
        points: Further capture points.
        fsync: Whether an iteration is forced to the disk before it is committed.
        dry_run: Count what would be written, to the byte, and write nothing.
    """

    enabled: bool = False
    directory: Path = Path(DEFAULT_DIRECTORY)
    control_iter: int = 1
    collect_micro_batches: int = 1
    filter: TensorFilter = field(default_factory=TensorFilter)
    schedule: Schedule = field(default_factory=Schedule)
    budget_bytes: int = int(DEFAULT_BUDGET_GB * BYTES_PER_GB)
    host_memory_bytes: int = int(DEFAULT_HOST_MEMORY_GB * BYTES_PER_GB)
    stop_on_error: bool = False
    mode: str = "tensors"
    save_format: str = "pt"
    points: frozenset[str] = frozenset()
    fsync: bool = False
    dry_run: bool = False

    @property
    def keeps_tensors(self) -> bool:
        """Whether tensors are kept."""
        return self.mode != "statistics"

    @property
    def keeps_blocks(self) -> bool:
        """Whether maps of block exponents are; statistics of whole tensors always are."""
        return self.mode != "tensors"

    @classmethod
    def from_namespace(cls, namespace: Namespace, environment: Mapping[str, str] | None = None) -> CaptureConfig:
        """The settings of a parsed command line; what the namespace lacks has the flag's default.

        Raises:
            CaptureUsageError: for a value that is not allowed, in a flag or in the environment.
        """
        environment = os.environ if environment is None else environment
        flags: dict[str, Any] = {flag.destination: flag.default for flag in CAPTURE_FLAGS.flags} | vars(namespace)
        by_hand = flags["save_tensors"]
        for flag in CAPTURE_FLAGS.flags:
            _check_choice(flag, flags[flag.destination])
        return cls(
            enabled=(enabled_by_environment(environment) or False) if by_hand is None else bool(by_hand),
            directory=resolve_directory(flags["tensor_save_dir"], environment),
            control_iter=flags["control_iter"],
            collect_micro_batches=flags["collect_micro_batches"],
            filter=TensorFilter.parse(flags["tensor_filter"]),
            schedule=Schedule.parse(flags["tensor_schedule"]),
            budget_bytes=int(flags["tensor_budget_gb"] * BYTES_PER_GB),
            host_memory_bytes=int(flags["tensor_host_memory_gb"] * BYTES_PER_GB),
            stop_on_error=flags["tensor_on_error"] == "stop",
            mode=flags["tensor_save_mode"],
            save_format=flags["tensor_save_format"],
            points=frozenset(flags["tensor_points"] or ()),
            fsync=bool(flags["tensor_fsync"]),
            dry_run=bool(flags["tensor_dry_run"]),
        )

    def write_back(self, namespace: Namespace) -> None:
        """Put what flag, environment and default came to into `namespace`."""
        namespace.save_tensors = self.enabled
        namespace.tensor_save_dir = str(self.directory)


def _check_choice(flag: Flag, value: Any) -> None:
    """Argparse has seen to this already; a namespace made by hand has not met it."""
    values = value if flag.nargs else [value]
    for each in values or ():
        if flag.choices is not None and each not in flag.choices:
            raise CaptureUsageError(f"{flag.name} {each!r} is not allowed: give {', '.join(flag.choices)}")


def enabled_by_environment(environment: Mapping[str, str]) -> bool | None:
    """What TENSOR_SAVE_ENABLED says; None when it is not set or empty.

    Raises:
        CaptureUsageError: when it says neither yes nor no.
    """
    text = environment.get(ENABLED_VARIABLE, "").strip()
    if not text:
        return None
    if text.lower() not in _YES + _NO:
        raise CaptureUsageError(
            f"{ENABLED_VARIABLE}={text!r} is not allowed: give {', '.join(_YES)} or {', '.join(_NO)}"
        )
    return text.lower() in _YES


def resolve_directory(by_hand: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> Path:
    """The capture root: what was set by hand, else TENSOR_SAVE_DIR, else the default."""
    return Path(by_hand or environment.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
