"""What the tests of linear and attention share: formats for every operand, and a tap that writes down its calls."""

from collections.abc import Callable

import pytest
import torch

from megatron.quantscope.formats import fake_quantize
from megatron.quantscope.gemm.operands import OperandFormats


class Recorder:
    """A tap that keeps every call, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.tensors: dict[tuple[str, str, str], torch.Tensor] = {}

    def __call__(self, operation: str, phase: str, name: str, tensor: torch.Tensor) -> None:
        self.calls.append((operation, phase, name))
        self.tensors[operation, phase, name] = tensor.detach().clone()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def all_formats() -> Callable[..., OperandFormats]:
    """A LinearQuant or AttentionQuant with one format for all operands, or one for each."""

    def make(kind: type[OperandFormats], name: str = "none", gradient: str | None = None, **rules) -> OperandFormats:
        names = dict.fromkeys(("dy", "do", "ds"), name if gradient is None else gradient)
        gemms = {gemm: {o: names.get(o, name) for o in operands} for gemm, operands in kind.GEMMS.items()}
        return kind(gemms=gemms, **rules)

    return make


@pytest.fixture(scope="session")
def slow_quantize() -> Callable[[torch.Tensor, OperandFormats, str, str, int], torch.Tensor]:
    """An operand quantised by the plain reference of the formats, for formats without a gradient scale."""

    def quantize(tensor: torch.Tensor, quant: OperandFormats, gemm: str, operand: str, axis: int) -> torch.Tensor:
        name = quant.gemms[gemm][operand]
        if name == "none":
            return tensor
        return fake_quantize(tensor, name, axis=axis, scale_rule=quant.scale_rule, backend="reference")

    return quantize
