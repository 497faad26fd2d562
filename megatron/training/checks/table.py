"""What a table of wrong combinations is: each row says when it is wrong, and what the user reads then.

Rows are walked in order and may rely on the rows above them. `{name}` in a line is the argument of that name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.training.failure import UsageError

Check = tuple[Callable[[argparse.Namespace], Any], str]


def check(args: argparse.Namespace, checks: tuple[Check, ...]) -> None:
    """Walk `checks`.

    Raises:
        UsageError: with the line of the first row that holds.
    """
    for is_wrong, line in checks:
        if is_wrong(args):
            raise UsageError(line.format(**vars(args)))
