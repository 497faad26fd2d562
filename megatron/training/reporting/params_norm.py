"""The norm of all parameters, for --log-params-norm, and whether the replicas of the weights agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import check_param_hashes_across_dp_replicas
from megatron.training.failure import SharedFailure


def params_norm(model: list[torch.nn.Module]) -> float:
    """The 2-norm of the parameters of the whole model, each counted once, on every rank (collective).

    Where the optimizer holds a float32 version of a parameter, that one counts, as in Megatron-LM.
    """
    sums = _Sums()
    for parameter in _counted(model):
        sums.add(parameter)
    return sums.total() ** 0.5


def require_equal_replicas(model: list[torch.nn.Module], iteration: int) -> None:
    """See that all data parallel ranks have the same weights (collective).

    Raises:
        SharedFailure: when they do not.
    """
    differs = not check_param_hashes_across_dp_replicas(model, cross_check=True)
    found = torch.tensor(int(differs), device=torch.cuda.current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if found:
        raise SharedFailure(
            f"the data parallel ranks have different weights after iteration {iteration} "
            "(--check-weight-hash-across-dp-replicas-interval)"
        )


def _counted(model: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """The parameters that this rank counts: copies on other tensor parallel ranks and of a tied embedding do not."""
    for chunk in model:
        for parameter in chunk.parameters():
            if param_is_not_tensor_parallel_duplicate(parameter) and param_is_not_shared(parameter):
                yield parameter


class _Sums:
    """Sums of squares, apart by the ranks that they are still to be added over."""

    def __init__(self) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        self._whole, self._split, self._experts = zero.clone(), zero.clone(), zero.clone()

    def add(self, parameter: torch.nn.Parameter) -> None:
        """Add a parameter, by the version of it that counts."""
        of_expert = not getattr(parameter, "allreduce", True)
        split = getattr(parameter, "main_param_sharded", False) and hasattr(parameter, "main_param")
        values = getattr(parameter, "main_param", parameter)
        if values is None:
            return  # the distributed optimizer of another rank holds it
        squares = values.detach().double().square().sum()
        if split:  # over data parallel ranks, of an expert's over fewer of them
            self._split += squares
        elif of_expert:
            self._experts += squares
        else:
            self._whole += squares

    def total(self) -> float:
        """The sum over all ranks."""
        state = parallel_state
        dist.all_reduce(self._split, group=state.get_data_parallel_group(with_context_parallel=True))
        whole = self._whole + self._split
        dist.all_reduce(whole, group=state.get_model_parallel_group())
        dist.all_reduce(self._experts, group=state.get_expert_tensor_model_pipeline_parallel_group())
        return float(whole + self._experts)
