"""What a captured tensor is to its GEMM, in the short symbols of the field, and where it stands in the network.

    linear      y = x wT          fprop     dx = dy w       dgrad     dw = dyT x      wgrad
    attention   s = q kT, o = p v           dq, dk, dv from do

An *operand* goes into a GEMM and is what a number format is applied to; a *result* comes out of one. A *site* is a
module and a symbol, such as `fc2.x`: the same place in every layer.

Most operands go into two GEMMs, which sum along different axes and so cut it into different blocks: its *uses*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.quantscope.flags.quantization import UNQUANTIZED

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATION, WEIGHT, GRADIENT, WEIGHT_GRADIENT = "activation", "weight", "gradient", "weight gradient"
FAMILIES = (ACTIVATION, WEIGHT, GRADIENT, WEIGHT_GRADIENT)
GRADIENT_FAMILIES = (GRADIENT, WEIGHT_GRADIENT)

_MODULE_PREFIX = "linear_"
_MODULE_NAMES = {"core_attention": "attn"}
_MODULE_ORDER = ("qkv", "attn", "proj", "fc1", "fc2")


_TOKEN_DIMS = 2  # [sequence, micro-batch, ...]


@dataclass(frozen=True)
class Use:
    """One GEMM that an operand goes into.

    Attributes:
        gemm: Its name, as in `capture.metadata`.
        axis: The axis along which it sums, and so along which blocks run: of the captured tensor, or, if one of the
            following is set, of the tensor that it is turned into first.
        tokens: Sequence and micro-batch [s, b, ...] become one axis, [s * b, ...].
        heads: The last axis [..., h * d] holds the features of all heads side by side and becomes [..., h, d].
    """

    gemm: str
    axis: int
    tokens: bool = False
    heads: bool = False

    def view(self, tensor: Tensor, head_dim: int | None = None) -> tuple[Tensor, int]:
        """The operand as its GEMM is given it, and the axis of that along which blocks run, from 0.

        Args:
            tensor: As captured, of any shape; one that has no such axis is cut along its last.
            head_dim: Features of a head, where `heads` asks for it; None or unfit: the last axis is taken as one head.
        """
        if self.tokens and tensor.dim() > _TOKEN_DIMS:
            tensor = tensor.flatten(0, _TOKEN_DIMS - 1)
        if self.heads and head_dim and tensor.dim() and tensor.shape[-1] % head_dim == 0:
            tensor = tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // head_dim, head_dim)
        dims = max(1, tensor.dim())
        return tensor, self.axis % dims if -dims <= self.axis < dims else dims - 1


LAST_AXIS = Use("", -1)
"""How tensors that go into no GEMM are cut."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """The part a tensor plays.

    Attributes:
        symbol: x, w, y, dy, ... as in the equations above.
        title: The symbol in words.
        family: Which of `FAMILIES` its values belong to.
        uses: The GEMMs that it goes into, one or two; () of a result.
    """

    symbol: str
    title: str
    family: str
    uses: tuple[Use, ...] = ()

    @property
    def operand(self) -> bool:
        """Whether it goes into a GEMM; if not, it is a result."""
        return bool(self.uses)

    @property
    def cuts(self) -> tuple[Use, ...]:
        """How blocks are cut, one way a use; a result is cut along its last axis."""
        return self.uses or (LAST_AXIS,)

    def first_quantised(self, formats: Mapping[str, Any]) -> tuple[int, str] | None:
        """The first GEMM that was given the tensor quantised: its place in `uses`, and the name of the format.

        Args:
            formats: GEMM -> operand -> format, as captures have it; what is no mapping of operands is taken for a name.

        Returns:
            None where all its GEMMs had it as it was, or it goes into none.
        """
        for place, use in enumerate(self.uses):
            operands = formats.get(use.gemm, UNQUANTIZED)
            name = str(operands.get(self.symbol, UNQUANTIZED) if isinstance(operands, Mapping) else operands)
            if name != UNQUANTIZED:
                return place, name
        return None


def _role(symbol: str, title: str, family: str, *uses: Use) -> Role:
    return Role(symbol=symbol, title=title, family=family, uses=uses)


ROLES: dict[tuple[str, str], Role] = {
    ("linear", "input"): _role("x", "linear input", ACTIVATION, Use("fprop", -1), Use("wgrad", 0, tokens=True)),
    ("linear", "weight"): _role("w", "linear weight", WEIGHT, Use("fprop", -1), Use("dgrad", 0)),
    ("linear", "output"): _role("y", "linear output", ACTIVATION),
    ("linear", "grad_output"): _role(
        "dy", "linear grad output", GRADIENT, Use("dgrad", -1), Use("wgrad", 0, tokens=True)
    ),
    ("linear", "grad_input"): _role("dx", "linear grad input", GRADIENT),
    ("linear", "grad_weight"): _role("dw", "linear grad weight", WEIGHT_GRADIENT),
    # [sequence, micro-batch, heads, head_dim]
    ("attention", "query"): _role("q", "attention query", ACTIVATION, Use("scores", -1), Use("dk", 0)),
    ("attention", "key"): _role("k", "attention key", ACTIVATION, Use("scores", -1), Use("dq", 0)),
    ("attention", "value"): _role("v", "attention value", ACTIVATION, Use("context", 0), Use("dp", -1)),
    # [micro-batch, heads, queries, keys]
    ("attention", "attention_probs"): _role(
        "p", "attention probabilities", ACTIVATION, Use("context", -1), Use("dv", -2)
    ),
    # [sequence, micro-batch, heads * head_dim]
    ("attention", "output"): _role("o", "attention output", ACTIVATION),
    ("attention", "grad_output"): _role(
        "do", "attention grad output", GRADIENT, Use("dp", -1, heads=True), Use("dv", 0)
    ),
    ("attention", "grad_query"): _role("dq", "attention grad query", GRADIENT),
    ("attention", "grad_key"): _role("dk", "attention grad key", GRADIENT),
    ("attention", "grad_value"): _role("dv", "attention grad value", GRADIENT),
}
SYMBOL_ORDER = tuple(role.symbol for role in ROLES.values())


def role_of(layer_type: str, tensor_name: str) -> Role:
    """The role of a tensor; one of another tool's making is named by its own name and is no operand."""
    known = ROLES.get((layer_type, tensor_name))
    if known:
        return known
    family = GRADIENT if tensor_name.startswith("grad") else ACTIVATION
    return _role(tensor_name, f"{layer_type} {tensor_name}".replace("_", " "), family)


def module_label(module: str | None, layer_type: str) -> str:
    """The last part of a module's name, short: `decoder.layers.3.mlp.linear_fc2` is `fc2`; unknown: the layer type."""
    if not module:
        return layer_type
    last = module.rsplit(".", 1)[-1]
    if last.isdecimal():  # a layer itself, as of the residual stream: the same site in all of them
        return layer_type
    return _MODULE_NAMES.get(last, last.removeprefix(_MODULE_PREFIX))


def site_order(site: str) -> tuple[int, str, int, str]:
    """Sort key of sites: along the way of the forward pass, then by symbol as in `ROLES`."""
    module, _, symbol = site.partition(".")
    module_rank = _MODULE_ORDER.index(module) if module in _MODULE_ORDER else len(_MODULE_ORDER)
    symbol_rank = SYMBOL_ORDER.index(symbol) if symbol in SYMBOL_ORDER else len(SYMBOL_ORDER)
    return module_rank, module, symbol_rank, symbol
