"""Where a process stands in a parallel run, and which run it is: given to capture, which knows nothing of Megatron."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from datetime import datetime

from megatron.quantscope.capture.errors import CaptureUsageError

AXES = ("tp", "pp", "dp", "cp", "ep", "etp")  # tensor, pipeline, data, context, expert, tensor of an expert
STAMP_FORMAT = "%Y%m%d_%H%M%S"  # of run ids and file names: sorts by time, and has no character a file system dislikes
_RUN_SUFFIX_BYTES = 3  # two runs started in one second differ here


@dataclass(frozen=True, kw_only=True)
class ParallelCoordinates:
    """Rank and size of this process along every axis of parallelism; one process alone by default.

    Raises:
        CaptureUsageError: when a rank does not lie in [0, size).
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise CaptureUsageError(f"{axis}_rank {rank} is not allowed: give 0 <= rank < {axis}_size = {size}")

    @property
    def world_size(self) -> int:
        """Processes of the run. Expert parallelism divides the data-parallel ranks anew and adds none."""
        return self.tp_size * self.pp_size * self.dp_size * self.cp_size

    def to_dict(self) -> dict[str, int]:
        """Plain names and numbers, as kept in metadata."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def new_run_id() -> str:
    """A name for one run, `YYYYmmdd_HHMMSS_xxxxxx`. In a parallel run one rank draws it and tells the others.

    The six hexadecimal digits come from the operating system, so that no seeded generator of the training moves.
    """
    return f"{datetime.now().strftime(STAMP_FORMAT)}_{secrets.token_hex(_RUN_SUFFIX_BYTES)}"
