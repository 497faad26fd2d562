"""What a captured tensor is to its GEMM, in the short symbols of the field, and where it stands in the network.

    linear      y = x wT          fprop     dx = dy w       dgrad     dw = dyT x      wgrad
    attention   s = q kT, o = p v           dq, dk, dv from do

An *operand* goes into a GEMM and is what a number format is applied to; a *result* comes out of one. A *site* is a
module and a symbol, such as `fc2.x`: the same place in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATION, WEIGHT, GRADIENT, WEIGHT_GRADIENT = "activation", "weight", "gradient", "weight gradient"
FAMILIES = (ACTIVATION, WEIGHT, GRADIENT, WEIGHT_GRADIENT)
GRADIENT_FAMILIES = (GRADIENT, WEIGHT_GRADIENT)

_MODULE_PREFIX = "linear_"
_MODULE_NAMES = {"core_attention": "attn"}
_MODULE_ORDER = ("qkv", "attn", "proj", "fc1", "fc2")


@dataclass(frozen=True, kw_only=True)
class Role:
    """The part a tensor plays.

    Attributes:
        symbol: x, w, y, dy, ... as in the equations above.
        title: The symbol in words.
        family: Which of `FAMILIES` its values belong to.
        operand: Whether it goes into a GEMM; if not, it is a result.
        contraction: The axis of the captured tensor along which its forward GEMM (a gradient's: its dgrad) sums, and
            so the one along which blocks are cut.
    """

    symbol: str
    title: str
    family: str
    operand: bool
    contraction: int = -1

    @property
    def is_gradient(self) -> bool:
        """Whether the values are gradients, which training may scale before it quantises them."""
        return self.family in GRADIENT_FAMILIES


def _role(symbol: str, title: str, family: str, operand: bool, contraction: int = -1) -> Role:
    return Role(symbol=symbol, title=title, family=family, operand=operand, contraction=contraction)


ROLES: dict[tuple[str, str], Role] = {
    ("linear", "input"): _role("x", "linear input", ACTIVATION, True),
    ("linear", "weight"): _role("w", "linear weight", WEIGHT, True),
    ("linear", "output"): _role("y", "linear output", ACTIVATION, False),
    ("linear", "grad_output"): _role("dy", "linear grad output", GRADIENT, True),
    ("linear", "grad_input"): _role("dx", "linear grad input", GRADIENT, False),
    ("linear", "grad_weight"): _role("dw", "linear grad weight", WEIGHT_GRADIENT, False),
    ("attention", "query"): _role("q", "attention query", ACTIVATION, True),
    ("attention", "key"): _role("k", "attention key", ACTIVATION, True),
    ("attention", "value"): _role("v", "attention value", ACTIVATION, True, 0),  # o = p v sums over keys
    ("attention", "attention_probs"): _role("p", "attention probabilities", ACTIVATION, True),
    ("attention", "output"): _role("o", "attention output", ACTIVATION, False),
    ("attention", "grad_output"): _role("do", "attention grad output", GRADIENT, True),
    ("attention", "grad_query"): _role("dq", "attention grad query", GRADIENT, False),
    ("attention", "grad_key"): _role("dk", "attention grad key", GRADIENT, False),
    ("attention", "grad_value"): _role("dv", "attention grad value", GRADIENT, False),
}
SYMBOL_ORDER = tuple(role.symbol for role in ROLES.values())


def role_of(layer_type: str, tensor_name: str) -> Role:
    """The role of a tensor; one of another tool's making is named by its own name and is no operand."""
    known = ROLES.get((layer_type, tensor_name))
    if known:
        return known
    family = GRADIENT if tensor_name.startswith("grad") else ACTIVATION
    return _role(tensor_name, f"{layer_type} {tensor_name}".replace("_", " "), family, False)


def module_label(module: str | None, layer_type: str) -> str:
    """The last part of a module's name, short: `decoder.layers.3.mlp.linear_fc2` is `fc2`; unknown: the layer type."""
    if not module:
        return layer_type
    last = module.rsplit(".", 1)[-1]
    return _MODULE_NAMES.get(last, last.removeprefix(_MODULE_PREFIX))


def site_order(site: str) -> tuple[int, str, int, str]:
    """Sort key of sites: along the way of the forward pass, then by symbol as in `ROLES`."""
    module, _, symbol = site.partition(".")
    module_rank = _MODULE_ORDER.index(module) if module in _MODULE_ORDER else len(_MODULE_ORDER)
    symbol_rank = SYMBOL_ORDER.index(symbol) if symbol in SYMBOL_ORDER else len(SYMBOL_ORDER)
    return module_rank, module, symbol_rank, symbol
