"""Upstream's wrappers of TransformerEngine's modules, and a probe that can be attached to one of them.

A module of TransformerEngine does more than a GEMM within one autograd function: it normalises, gathers, quantises,
multiplies and reduces. None of that is replaced, so a probe here only watches: the module runs as upstream wrote it,
in whatever recipe, and what enters and leaves it is shown in high precision. What that is differs from the local
layers, and the field `stage` of the metadata says how (docs/transformer_engine.md has the table):

    input          of a layernorm-linear: before its norm. Under sequence parallelism: this rank's slice of the sequence
    weight         dequantised where it exists in a low-precision format only (--fp8-param-gather)
    output         of a row-parallel layer: after the reduction over the tensor-parallel ranks
    grad_input     of a column-parallel layer: after the reduction; of a layernorm-linear: through the norm too
    grad_weight    what the GEMM gave to autograd. TransformerEngine adds it to `main_grad` itself where it fuses the
                   accumulation (`fuse_wgrad_accumulation`); there is no such tensor then, and none is kept

How the gradients are seen without changing them: that of the input by a hook on a view of it, which has the gradient of
this use alone (what enters a layernorm-linear feeds the residual stream too); that of the output by a hook on it; that
of the weight by a hook on the node of the graph that took the weight, so that it belongs to this forward even where
pipeline stages have several in flight. Full backward hooks would wrap inputs and outputs in nodes of their own.

Where TransformerEngine is not installed upstream's classes are placeholders, and nothing is added to them.
"""

from megatron.core import _overlay

_overlay.module(globals())

import functools
import warnings
from collections.abc import Callable
from typing import Any

from megatron.core.probe import Probe
from megatron.core.transformer.attention_watch import watched
from megatron.quantscope.capture.recompute import remembering

NOT_QUANTIZED = (
    "TransformerEngine's modules run GEMMs of their own, whose operands --quant-type can not quantise; "
    "use --transformer-impl local, or TransformerEngine's --fp8-format"
)
NO_WEIGHT_GRADIENT = (
    "grad_weight of TransformerEngine's layers is not kept, since it is added to main_grad within the GEMM; "
    "--no-gradient-accumulation-fusion makes a tensor of it"
)
NOT_GROUPED = "grouped GEMMs (--moe-grouped-gemm) are neither quantised nor kept; use sequential experts"

_upstream_te_checkpoint: Callable[..., Any] = te_checkpoint


@functools.wraps(_upstream_te_checkpoint)
def te_checkpoint(forward_func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Upstream's `te_checkpoint` of a function that remembers when it was first called (see tensor_parallel.random)."""
    return _upstream_te_checkpoint(remembering(forward_func), *args, **options)


def is_low_precision(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor holds codes and scales of TransformerEngine in place of values."""
    from megatron.core.fp8_utils import is_float8tensor  # which imports this module

    return tensor is not None and is_float8tensor(tensor)


def in_high_precision(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, dequantised where it holds codes."""
    from megatron.core.fp8_utils import dequantize_fp8_tensor

    if not is_low_precision(tensor):
        return tensor
    with torch.no_grad():
        return dequantize_fp8_tensor(tensor)


def _probed_linear_forward(layer: torch.nn.Module, probe: Probe[Any], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Upstream's `forward`, with what enters and leaves it, and the gradients, shown to the probe."""
    tap = probe.tap()
    if tap is None:
        return type(layer).forward(layer, x)
    tap("forward", "pre", "input", in_high_precision(x))
    tap("forward", "pre", "weight", in_high_precision(layer.weight))
    x = x if is_low_precision(x) else x.view_as(x)  # codes have no views, and one use only
    output, bias = type(layer).forward(layer, x)
    tap("forward", "post", "output", in_high_precision(output))
    if output.requires_grad:
        _watch_gradients(layer, tap, x, output)
    return output, bias


def _watch_gradients(layer: torch.nn.Module, tap: Any, x: torch.Tensor, output: torch.Tensor) -> None:
    """Show the gradients of one forward when autograd comes by."""

    def show_operands(grad_output: torch.Tensor) -> None:
        tap("backward", "pre", "grad_output", in_high_precision(grad_output))
        if not is_low_precision(layer.weight):  # else dgrad multiplies by other codes than fprop
            tap("backward", "pre", "weight", layer.weight)

    output.register_hook(show_operands)
    if x.requires_grad:
        x.register_hook(lambda grad: tap("backward", "post", "grad_input", in_high_precision(grad)))
    if layer.weight.requires_grad and not layer.fuse_wgrad_accumulation:
        _watch_weight_gradient(layer.weight, tap, x, output)


def _watch_weight_gradient(weight: torch.Tensor, tap: Any, x: torch.Tensor, output: torch.Tensor) -> None:
    """Hook the node between `x` and `output` that `weight` goes into; its results are the gradients of its operands."""
    waiting, seen = [output.grad_fn], {None, x.grad_fn}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        operands = [operand for operand, _ in node.next_functions]
        numbers = [number for number, each in enumerate(operands) if getattr(each, "variable", None) is weight]
        if numbers:
            node.register_hook(functools.partial(_show_weight_gradient, tap, numbers[0]))
            return
        waiting += operands


def _show_weight_gradient(tap: Any, number: int, gradients: tuple[Any, ...], _: tuple[Any, ...]) -> None:
    if gradients[number] is not None:
        tap("backward", "post", "grad_weight", in_high_precision(gradients[number]))


def _probed_attention_forward(
    module: torch.nn.Module,
    probe: Probe[Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Upstream's `forward`, with operands, output and their gradients shown to the probe."""
    tap, forward = probe.tap(), functools.partial(type(module).forward, module)
    if tap is not None:
        forward = functools.partial(watched, forward, tap)
    return forward(query, key, value, attention_mask, *args, **options)


def _attaches(forward: Callable[..., Any]) -> Callable[[torch.nn.Module, Probe[Any]], None]:
    """A method that makes `forward` the module's, with a probe."""

    def attach_probe(self: torch.nn.Module, probe: Probe[Any]) -> None:
        """Watch this module as `probe` says; a second call replaces the first probe.

        Raises:
            ValueError: when the module is to be quantised.
        """
        if probe.quant is not None:
            raise ValueError(NOT_QUANTIZED)
        if getattr(self, "fuse_wgrad_accumulation", False):
            warnings.warn(NO_WEIGHT_GRADIENT, stacklevel=2)
        self.forward = functools.partial(forward, self, probe)

    return attach_probe


def _refuse_probe(self: torch.nn.Module, probe: Probe[Any]) -> None:
    """Grouped linear layers have a weight an expert, and rows of all of them in one tensor."""
    raise ValueError(NOT_GROUPED)


if HAVE_TE:
    TELinear.attach_probe = _attaches(_probed_linear_forward)
    TELayerNormColumnParallelLinear.attach_probe = _attaches(_probed_linear_forward)
    TEDotProductAttention.attach_probe = _attaches(_probed_attention_forward)
    if TEGroupedLinear is not None:
        TEGroupedLinear.attach_probe = _refuse_probe
