"""The public saving API: a thin face of `megatron.quantscope.capture`, which documents every function.

    from megatron.core.tensor_saver import initialize_tensor_collection, save_tensor

    initialize_tensor_collection(rank=0, iteration=3)
    path = save_tensor(x, "linear", "forward", "mxfp8", "input", layer_idx=0, phase="pre", component="linear")

Importing it imports neither torch nor anything of megatron-core, since it is imported inside megatron-core's own cycle.
"""

from megatron.quantscope.capture.saver import TensorSaver
from megatron.quantscope.capture.state import STATE, TensorCollectionState

__all__ = [
    "TensorCollectionState",
    "TensorSaver",
    "get_current_rank_and_sample",
    "get_tensor_collection_state",
    "get_tensor_saver",
    "initialize_tensor_collection",
    "save_attention_tensors",
    "save_linear_tensors",
    "save_tensor",
    "set_global_batch_idx",
    "set_global_iteration",
    "set_global_rank",
    "set_global_sample_idx",
    "set_global_sequence_idx",
]

_SAVER = TensorSaver()

save_tensor = _SAVER.save_tensor
save_linear_tensors = _SAVER.save_linear_tensors
save_attention_tensors = _SAVER.save_attention_tensors


def get_tensor_saver() -> TensorSaver:
    """The saver of this process."""
    return _SAVER


def get_tensor_collection_state() -> TensorCollectionState:
    """The running coordinates of this process."""
    return STATE


def initialize_tensor_collection(
    rank: int | None = None,
    sample_idx: int | None = None,
    iteration: int | None = 0,
    batch_idx: int = 0,
    sequence_idx: int = 0,
) -> None:
    """Set all coordinates by hand; None leaves one to torch.distributed, the environment and its default."""
    STATE.current_rank = rank
    STATE.current_sample_idx = sample_idx
    STATE.current_iteration = iteration
    STATE.batch_idx = batch_idx
    STATE.sequence_idx = sequence_idx


def set_global_rank(rank: int | None) -> None:
    """Set the global rank by hand; None takes that back."""
    STATE.current_rank = rank


def set_global_sample_idx(sample_idx: int | None) -> None:
    """Set the global sample index by hand; None takes that back."""
    STATE.current_sample_idx = sample_idx


def set_global_iteration(iteration: int | None) -> None:
    """Set the iteration by hand; None takes that back."""
    STATE.current_iteration = iteration


def set_global_batch_idx(batch_idx: int) -> None:
    """Set the micro-batch of the iteration."""
    STATE.batch_idx = batch_idx


def set_global_sequence_idx(sequence_idx: int) -> None:
    """Set the sequence of the micro-batch."""
    STATE.sequence_idx = sequence_idx


def get_current_rank_and_sample() -> tuple[int, int]:
    """The rank and the sample index that a save without its own would carry now."""
    return STATE.current_rank, STATE.current_sample_idx
