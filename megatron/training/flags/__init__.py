"""The trainer's command line, by topic: Megatron-LM's flag names, and ours for quantisation and capture.

Only the standard library is imported here: `--help` and every wrong flag are answered before torch is loaded.
"""

from megatron.quantscope.flags import CAPTURE_FLAGS, QUANTIZATION_FLAGS, FlagGroup
from megatron.training.flags.checkpoint import CHECKPOINT_FLAGS
from megatron.training.flags.data import DATA_FLAGS
from megatron.training.flags.engine import ENGINE_FLAGS
from megatron.training.flags.experts import EXPERT_FLAGS
from megatron.training.flags.kernels import KERNEL_FLAGS
from megatron.training.flags.model import MODEL_FLAGS
from megatron.training.flags.numerics import NUMERICS_FLAGS
from megatron.training.flags.optimization import BATCH_FLAGS, OPTIMIZER_FLAGS
from megatron.training.flags.parallelism import PARALLELISM_FLAGS
from megatron.training.flags.reporting import EVALUATION_FLAGS, PROFILING_FLAGS, REPORTING_FLAGS

FLAG_GROUPS: tuple[FlagGroup, ...] = (
    QUANTIZATION_FLAGS,
    CAPTURE_FLAGS,
    MODEL_FLAGS,
    EXPERT_FLAGS,
    DATA_FLAGS,
    BATCH_FLAGS,
    OPTIMIZER_FLAGS,
    NUMERICS_FLAGS,
    KERNEL_FLAGS,
    ENGINE_FLAGS,
    PARALLELISM_FLAGS,
    CHECKPOINT_FLAGS,
    EVALUATION_FLAGS,
    REPORTING_FLAGS,
    PROFILING_FLAGS,
)

__all__ = ["FLAG_GROUPS"]
