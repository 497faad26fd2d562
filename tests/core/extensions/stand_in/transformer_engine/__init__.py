"""A stand-in for TransformerEngine, for tests on machines without a GPU.

Plain torch under TransformerEngine's names and signatures, as far as megatron-core asks for them: enough to build and
train a GPT model of `--transformer-impl transformer_engine` over gloo. What matters to capture is as in the original:
a linear layer is one autograd function that gathers, multiplies and reduces; a layernorm-linear normalises within it;
FP8 operands exist within it only; activations are recomputed through a `checkpoint` of its own.
"""

__version__ = "2.6.0"

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
