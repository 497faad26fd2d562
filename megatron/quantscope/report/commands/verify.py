"""`verify`: every damaged, missing or foreign file of a capture, one line each; as the capture's own command does."""

from __future__ import annotations

import argparse

from megatron.quantscope.capture.__main__ import run_verify


def run(options: argparse.Namespace) -> int:
    """Check everything that was written; 1 where something is wrong."""
    return run_verify(options)
