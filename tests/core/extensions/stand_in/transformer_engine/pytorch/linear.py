"""Linear layers whose gather, GEMM and reduction are one autograd function each."""

from types import SimpleNamespace

import torch

from transformer_engine.pytorch.distributed import gather, reduced, scattered
from transformer_engine.pytorch.fp8 import rounded
from transformer_engine.pytorch.norm import normalized
from transformer_engine.pytorch.tensor import QuantizedTensor


class _Linear(torch.autograd.Function):
    """y = norm(x) wT, or x wT; a slice, a summand or the whole of each, as `layer.parallel_mode` says."""

    @staticmethod
    def forward(ctx, norm_weight, norm_bias, weight, x, bias, layer):
        ctx.save_for_backward(norm_weight, norm_bias, weight, x)
        ctx.layer, ctx.has_bias = layer, bias is not None
        with torch.no_grad():
            operand = _gathered(layer, _normalized(layer, x, norm_weight, norm_bias), "column")
            ctx.operands = rounded(operand), rounded(_values(weight))
            y = ctx.operands[0] @ ctx.operands[1].t()
            y = _summed(layer, y, "row")
            return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy):
        norm_weight, norm_bias, weight, x = ctx.saved_tensors
        layer, (operand, w) = ctx.layer, ctx.operands
        dy = _gathered(layer, dy, "row")
        low = rounded(dy)
        dx = _summed(layer, low @ w, "column")
        dw = low.flatten(0, -2).t() @ operand.flatten(0, -2)
        if layer.fuse_wgrad_accumulation:
            weight.main_grad += dw
            dw = torch.zeros_like(dw)  # as the original: something of the right shape
        d_norm = (None, None)
        if norm_weight is not None:
            with torch.enable_grad():
                inputs = [each.detach().requires_grad_() for each in (x, norm_weight, norm_bias) if each is not None]
                x_, w_, b_ = (*inputs, None)[:3]
                dx, *of_norm = torch.autograd.grad(_normalized(layer, x_, w_, b_), inputs, dx)
            d_norm = (*of_norm, None)[:2]
        return (*d_norm, dw, dx, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None)


def _normalized(layer, x, weight, bias):
    return x if weight is None else normalized(x, weight, bias, layer.eps, layer.zero_centered_gamma)


def _values(weight):
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight


def _gathered(layer, tensor, mode):
    split = layer.parallel_mode == mode and layer.sequence_parallel and layer.tp_size > 1
    return gather(tensor, layer.tp_group) if split else tensor


def _summed(layer, tensor, mode):
    if layer.parallel_mode != mode or layer.tp_size == 1:
        return tensor
    return (scattered if layer.sequence_parallel else reduced)(tensor, layer.tp_group)


class Linear(torch.nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        return_bias=False,
        parallel_mode=None,
        params_dtype=None,
        device=None,
        **_,
    ):
        super().__init__()
        shards = SimpleNamespace(column=tp_size if parallel_mode == "column" else 1)
        shards.row = tp_size if parallel_mode == "row" else 1
        self.in_features, self.out_features = in_features // shards.row, out_features // shards.column
        self.sequence_parallel, self.fuse_wgrad_accumulation = sequence_parallel, fuse_wgrad_accumulation
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = False  # megatron-core sets it, which says nothing to this one
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype))
        _mark(self.weight, parallel_mode is not None, 1 if parallel_mode == "row" else 0)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype))
            _mark(self.bias, parallel_mode == "column", 0)
            self.bias.sequence_parallel = sequence_parallel and parallel_mode == "row"
        else:
            self.bias = torch.Tensor()
        init_method(self.weight.data)

    def forward(self, inp, is_first_microbatch=None):
        added = self.bias if self.use_bias and not self.return_bias else None
        y = _Linear.apply(*self._norm(), self.weight, inp, added, self)
        return (y, self.bias) if self.return_bias else y

    def _norm(self):
        return None, None


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        return_layernorm_output=False,
        **options,
    ):
        super().__init__(in_features, out_features, **options)
        assert not return_layernorm_output
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(in_features, dtype=options.get("params_dtype")))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=options.get("params_dtype")))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel

    def _norm(self):
        return self.layer_norm_weight, self.layer_norm_bias


class GroupedLinear(torch.nn.Module):
    """Something to derive from."""


def _mark(parameter, is_parallel, dim):
    parameter.tensor_model_parallel = is_parallel
    parameter.partition_dim, parameter.partition_stride = (dim if is_parallel else -1), 1
