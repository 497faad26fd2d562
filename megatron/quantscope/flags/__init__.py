"""The command-line flags of quantisation and capture, as tables that any argparse parser can walk.

Only the standard library is imported here: a parser with all our flags is built in milliseconds, before torch is.
"""

from megatron.quantscope.flags.capture import CAPTURE_FLAGS
from megatron.quantscope.flags.quantization import QUANTIZATION_FLAGS
from megatron.quantscope.flags.table import Flag, FlagGroup, add_flags, refused_flags

__all__ = ["CAPTURE_FLAGS", "QUANTIZATION_FLAGS", "Flag", "FlagGroup", "add_flags", "refused_flags"]
