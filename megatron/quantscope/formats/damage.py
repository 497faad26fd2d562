"""The record of what a format does to a tensor; `errors` defines its numbers and finds them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.quantscope.formats.exact import ZERO, ExactSum


@dataclass(frozen=True, kw_only=True)
class FormatDamage:
    """Counts and the sum of errors of one tensor, or of many.

    Attributes:
        underflow, saturated, lost: Elements.
        dead_blocks: Blocks; of a format without blocks, of 32 elements.
        error: Sum of squared errors.
    """

    underflow: int = 0
    saturated: int = 0
    lost: int = 0
    dead_blocks: int = 0
    error: ExactSum = ZERO

    @property
    def error_squares(self) -> float:
        """Sum of squared errors, rounded once."""
        return float(self.error)
