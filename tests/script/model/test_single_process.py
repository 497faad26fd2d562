"""megatron-core in one process."""

import torch

from script.model.single_process import model_parallel


def test_groups_are_there_inside_and_as_before_outside():
    from megatron.core import parallel_state

    before = torch.distributed.is_initialized(), parallel_state.model_parallel_is_initialized()
    for _ in range(2):
        with model_parallel():
            assert torch.distributed.get_world_size() == 1
            assert parallel_state.get_tensor_model_parallel_world_size() == 1
            with model_parallel():  # inside another, that one's groups are used and kept
                pass
            assert parallel_state.model_parallel_is_initialized()
        assert (torch.distributed.is_initialized(), parallel_state.model_parallel_is_initialized()) == before
