"""The quantisation flags, the preset or the recipe file: read before torch is imported, as every other flag."""

from __future__ import annotations

import argparse

from megatron.quantscope.gemm.recipe import QuantConfig
from megatron.training.failure import UsageError


def check_quantization(args: argparse.Namespace) -> None:
    """Check what is to be quantised.

    Raises:
        UsageError: for a value that is not allowed, a recipe file that can not be read, and layers that there are not.
    """
    try:
        QuantConfig.from_namespace(args).require_layers(args.num_layers)
    except ValueError as error:
        raise UsageError(str(error)) from None
