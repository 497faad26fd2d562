"""Which iterations are collected: `--tensor-schedule START:EVERY:UNTIL`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.quantscope.capture.errors import CaptureUsageError

_FIELDS = ("start", "every", "until")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every `every`-th iteration from `start`, before `until`.

    Steps count from 0 at this start of the training, also when it resumes at iteration 5,000.

    Attributes:
        start: First step that is collected.
        every: Distance of two collected steps, >= 1.
        until: First step that is not collected any more; None: no end.
    """

    start: int = 0
    every: int = 1
    until: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> Schedule:
        """The schedule of `START:EVERY:UNTIL`, each part of which may be left out.

        Raises:
            CaptureUsageError: for parts that are not whole numbers, and for a schedule that collects nothing.
        """
        parts = (text or "").split(":")
        given = {name: part for name, part in zip(_FIELDS, parts, strict=False) if part}
        if len(parts) > len(_FIELDS) or not all(part.isdecimal() for part in given.values()):
            raise CaptureUsageError(
                f"--tensor-schedule {text!r} is not allowed: give START:EVERY:UNTIL in whole numbers"
            )
        schedule = cls(**{name: int(part) for name, part in given.items()})
        if schedule.every < 1:
            raise CaptureUsageError(f"--tensor-schedule {text!r} is not allowed: EVERY must be >= 1")
        if schedule.exhausted(schedule.start):
            raise CaptureUsageError(f"--tensor-schedule {text!r} collects nothing: UNTIL must be greater than START")
        return schedule

    def collects(self, step: int) -> bool:
        """Whether the iteration that is `step` iterations after this start is collected."""
        return step >= self.start and (step - self.start) % self.every == 0 and not self.exhausted(step)

    def exhausted(self, step: int) -> bool:
        """Whether no iteration from `step` on is collected."""
        return self.until is not None and step >= self.until
