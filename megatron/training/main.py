"""The trainer's command: arguments, overlay, run, and an exit code with one line for whatever went wrong."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron.training.arguments import PROGRAM, parse_arguments
from megatron.training.failure import DONE, FAILED, INTERRUPTED, WRONG_USAGE, SharedFailure, TrainingError, UsageError

GRACE_S = 1.0  # torchrun ends all ranks when one has left: the first, which does the talking, must not be ended early
REPOSITORY = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer.

    Args:
        argv: Its arguments; None: those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
    """
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        if args.without_effect and args.rank == 0:
            print(args.without_effect, flush=True)
        _import_core()
        from megatron.training.training import pretrain

        pretrain(args)
    except (UsageError, SharedFailure) as error:
        _complain(error, everywhere=False)
        if os.environ.get("RANK", "0") != "0":
            time.sleep(GRACE_S)
        return WRONG_USAGE if isinstance(error, UsageError) else FAILED
    except TrainingError as error:
        _complain(error, everywhere=True)
        return FAILED
    except KeyboardInterrupt:
        _complain(Exception("interrupted"), everywhere=False)
        return INTERRUPTED
    return DONE


def _import_core() -> None:
    """Import megatron.core with the CPU stand-in around it, and see that it is this tree's.

    Raises:
        UsageError: when megatron-core is missing, or another copy of it wins over the overlay.
    """
    warnings.filterwarnings("ignore", message=".*Transformer Engine.*|.*Apex.*|.*apex.*")
    from megatron.training import cpu_device

    cpu_device.install()
    try:
        import megatron.core
    except ImportError as error:
        raise UsageError(str(error)) from None
    found = Path(megatron.core.__path__[0]).resolve()
    if found != REPOSITORY / "megatron" / "core":
        raise UsageError(
            f"megatron.core comes from {found}, not from this checkout, so nothing would be quantised or kept; start "
            f"{PROGRAM} by its path, or put {REPOSITORY} first on PYTHONPATH"
        )
    cpu_device.install_core()


def _complain(error: Exception, *, everywhere: bool) -> None:
    """One line on stderr; what every rank finds out alike is said by the first."""
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not everywhere and _follows(rank, world_size):
        return
    where = f" (rank {rank})" if everywhere and world_size != "1" else ""
    for line in str(error).splitlines():
        print(f"{PROGRAM}: error{where}: {line}", file=sys.stderr, flush=True)


def _follows(rank: str, world_size: str) -> bool:
    """Whether another rank is the first; where the environment makes no sense, no rank is."""
    return rank.isdigit() and world_size.isdigit() and 0 < int(rank) < int(world_size)
