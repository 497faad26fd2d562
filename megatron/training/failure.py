"""The ways a run ends early by our own decision, each with one line for the user and no traceback."""

from __future__ import annotations

DONE = 0
FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count


class UsageError(Exception):
    """The command line can not be honoured. Every rank finds out alike, so rank 0 alone says it. Exit code 2."""


class TrainingError(Exception):
    """The run can not go on. The rank that finds out says it. Exit code 1."""


class SharedFailure(TrainingError):
    """A failure that every rank finds out alike, so rank 0 alone says it. Exit code 1."""
