"""The seam between the GEMMs and whoever wants to see their operands: one call a tensor, nothing else."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Tap(Protocol):
    """Called with every operand before, and every result after, the GEMMs of a module.

    The tensors are the ones the computation uses, in high precision (operands before they are quantised): whoever keeps
    one copies it, and changes none. Order of the calls:

    linear     forward   pre   input, weight
               forward   post  output (the product, before the bias)
               backward  pre   grad_output, weight
               backward  post  grad_input, grad_weight
    attention  forward   pre   query, key, value
               forward   post  output
               backward  pre   grad_output
               backward  post  grad_query, grad_key, grad_value

    A gradient that autograd does not ask for is neither computed nor tapped, and the weight is an operand of the
    backward pass only where grad_input is computed.
    """

    def __call__(self, operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        """Take note of one tensor.

        Args:
            operation: `forward` or `backward`.
            phase: `pre` or `post`.
            name: Which tensor, as above.
            tensor: The tensor itself, not a copy.
        """
