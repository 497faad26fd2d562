"""Upstream's tensor-parallel linear layers, and a probe that can be attached to one of them.

A layer without a probe runs upstream's code and nothing of ours: the classes gain one method, `attach_probe`, and keep
every other. A probed layer replaces only its local GEMM. Communication stays Megatron's: the sequence-parallel gather,
the all-reduce or reduce-scatter of the input gradient and the reduction of a row-parallel output go through upstream's
autograd mappings, so what is quantised and kept are the operands and results of this rank's own GEMM.

Trade-off: under sequence parallelism upstream gathers the input twice, to save memory, and overlaps the second gather
with dgrad; a probed layer gathers once and keeps the gathered input until backward.
"""

from megatron.core import _overlay

_overlay.module(globals())

import functools
from typing import Any

from megatron.core.probe import Probe, maximum_over_shards
from megatron.quantscope.gemm import LinearQuant
from megatron.quantscope.gemm.linear import linear

_upstream_forward_impl = ColumnParallelLinear._forward_impl  # the row-parallel layer's is the same function body


def _probed_forward_impl(
    layer: torch.nn.Module,
    probe: Probe[LinearQuant],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    grad_output_buffer: list[torch.Tensor] | None = None,
    tp_group: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Upstream's `_forward_impl` with the local GEMM quantised as the probe says and its tensors shown to the probe."""
    tap = probe.tap()
    if probe.quant is None and tap is None:
        return _upstream_forward_impl(
            layer,
            input,
            weight,
            bias=bias,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=sequence_parallel,
            grad_output_buffer=grad_output_buffer,
            tp_group=tp_group,
            **options,
        )
    if grad_output_buffer is not None:
        raise RuntimeError("defer_embedding_wgrad_compute is not supported in a probed layer; switch it off")
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    accumulate = functools.partial(_accumulate_main_grad, weight) if gradient_accumulation_fusion else None
    return linear(
        input, weight, bias, quant=probe.quant, tap=tap, accumulate=accumulate, reduce_amax=maximum_over_shards(layer)
    )


def _accumulate_main_grad(weight: torch.Tensor, x_TK: torch.Tensor, dy_TN: torch.Tensor) -> torch.Tensor | None:
    """Add dyT x to `weight.main_grad` by upstream's fused kernel; returns what autograd is to take for the weight.

    Raises:
        RuntimeError: when `main_grad` has a dtype that the fused kernel does not know.
    """
    kernels = {
        torch.float32: fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32,
        torch.float16: fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16,
        torch.bfloat16: fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16,
    }
    if weight.main_grad.dtype not in kernels:
        raise RuntimeError(f"main_grad is {weight.main_grad.dtype}; allowed are {', '.join(map(str, kernels))}")
    kernels[weight.main_grad.dtype](x_TK, dy_TN, weight.main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # DDP then leaves the placeholder below out of main_grad
    new = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return new(weight.main_grad.shape, dtype=x_TK.dtype, device=x_TK.device)


def _attach_probe(self: torch.nn.Module, probe: Probe[LinearQuant]) -> None:
    """Quantise and watch this layer's local GEMM as `probe` says; a second call replaces the first probe."""
    self._forward_impl = functools.partial(_probed_forward_impl, self, probe)


ColumnParallelLinear.attach_probe = RowParallelLinear.attach_probe = _attach_probe
