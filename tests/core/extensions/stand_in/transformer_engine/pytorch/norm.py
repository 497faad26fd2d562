import torch
from torch.nn import functional


class _Norm(torch.nn.Module):
    names = ("weight",)

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=False,
        zero_centered_gamma=False,
        hidden_size=None,  # as older versions call it
        params_dtype=None,
        device=None,
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        for name in self.names:
            start = torch.zeros if name == "bias" or zero_centered_gamma else torch.ones
            parameter = torch.nn.Parameter(start(normalized_shape or hidden_size, dtype=params_dtype))
            parameter.sequence_parallel = sequence_parallel
            self.register_parameter(name, parameter)

    def forward(self, x):
        return normalized(x, self.weight, getattr(self, "bias", None), self.eps, self.zero_centered_gamma)


class RMSNorm(_Norm):
    pass


class LayerNorm(_Norm):
    names = ("weight", "bias")


def normalized(x, weight, bias, eps, zero_centered_gamma):
    weight = weight + 1 if zero_centered_gamma else weight
    if bias is None:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
