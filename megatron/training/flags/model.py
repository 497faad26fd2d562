"""Flags that say what the model is: its sizes, positions, normalisation and activation."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import positive_float, positive_int
from megatron.training.flags.values import fraction, non_negative_float

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")

MODEL_FLAGS = FlagGroup(
    "model",
    (
        Flag(name="--num-layers", type=positive_int, metavar="N", help="transformer layers"),
        Flag(name="--hidden-size", type=positive_int, metavar="N", help="width of the residual stream"),
        Flag(
            name="--ffn-hidden-size",
            type=positive_int,
            metavar="N",
            help="width of the MLP (default 4 x hidden size; with --swiglu 8/3 x, down to a multiple of 64)",
        ),
        Flag(name="--num-attention-heads", type=positive_int, metavar="N", help="query heads"),
        Flag(
            name="--kv-channels",
            type=positive_int,
            metavar="N",
            help="width of a head (default hidden size / query heads)",
        ),
        Flag(name="--group-query-attention", switch=True, default=False, help="query heads share key and value heads"),
        Flag(
            name="--num-query-groups",
            type=positive_int,
            default=1,
            metavar="N",
            help="key and value heads with --group-query-attention (default 1)",
        ),
        Flag(
            name="--max-position-embeddings",
            type=positive_int,
            metavar="N",
            help="longest sequence the model takes (default --seq-length)",
        ),
        Flag(
            name="--position-embedding-type",
            choices=POSITION_EMBEDDINGS,
            default="learned_absolute",
            help="how positions enter (default learned_absolute)",
        ),
        Flag(
            name="--use-rotary-position-embeddings",
            switch=True,
            default=False,
            help="older spelling of --position-embedding-type rope",
        ),
        Flag(name="--rotary-base", type=positive_float, default=10000.0, metavar="X", help="theta (default 10000)"),
        Flag(
            name="--rotary-percent",
            type=fraction,
            default=1.0,
            metavar="X",
            help="share of a head's width that is rotated (default 1)",
        ),
        Flag(
            name="--rotary-interleaved",
            switch=True,
            default=False,
            help="rotate neighbouring pairs instead of the two halves",
        ),
        Flag(
            name="--rotary-seq-len-interpolation-factor",
            type=positive_float,
            metavar="X",
            help="positions are divided by this (default: not)",
        ),
        Flag(name="--use-rope-scaling", switch=True, default=False, help="Llama 3.1's stretched rotary frequencies"),
        Flag(
            name="--rope-scaling-factor",
            type=positive_float,
            default=8.0,
            metavar="X",
            help="their factor (default 8)",
        ),
        Flag(
            name="--normalization",
            choices=NORMALIZATIONS,
            default="LayerNorm",
            help="norm before attention and MLP (default LayerNorm)",
        ),
        Flag(
            name="--norm-epsilon",
            type=positive_float,
            default=1e-5,
            metavar="X",
            help="its epsilon (default 1e-5)",
        ),
        Flag(
            name="--apply-layernorm-1p",
            dest="layernorm_zero_centered_gamma",
            switch=True,
            default=False,
            help="norms multiply by 1 + weight, so that weight decay pulls towards 1",
        ),
        Flag(name="--swiglu", switch=True, default=False, help="gated SiLU in the MLP instead of GELU"),
        Flag(name="--squared-relu", switch=True, default=False, help="squared ReLU in the MLP instead of GELU"),
        Flag(
            name="--disable-bias-linear",
            dest="add_bias_linear",
            switch=True,
            const=False,
            default=True,
            help="linear layers without bias",
        ),
        Flag(name="--add-qkv-bias", switch=True, default=False, help="bias in the QKV projection only"),
        Flag(name="--qk-layernorm", switch=True, default=False, help="norm on queries and keys"),
        Flag(
            name="--untie-embeddings-and-output-weights",
            switch=True,
            default=False,
            help="an output head of its own instead of the embedding",
        ),
        Flag(
            name="--vocab-size",
            type=positive_int,
            metavar="N",
            help="tokens of NullTokenizer without its end-of-document token, else: rows of the embedding before "
            "padding (default: the tokenizer's)",
        ),
        Flag(
            name="--make-vocab-size-divisible-by",
            type=positive_int,
            default=128,
            metavar="N",
            help="the vocabulary is padded to a multiple of N x tensor parallel size (default 128)",
        ),
        Flag(
            name="--init-method-std",
            type=non_negative_float,
            default=0.02,
            metavar="X",
            help="standard deviation of the initial weights (default 0.02)",
        ),
        Flag(
            name="--attention-dropout",
            type=fraction,
            default=0.1,
            metavar="X",
            help="dropout of the attention probabilities (default 0.1)",
        ),
        Flag(
            name="--hidden-dropout",
            type=fraction,
            default=0.1,
            metavar="X",
            help="dropout before each residual addition (default 0.1)",
        ),
        Flag(
            name="--use-mcore-models",
            dest="deprecated_use_mcore_models",
            switch=True,
            default=False,
            help="accepted and without effect, as in Megatron-LM: there are no other models",
        ),
        Flag(
            name="--spec",
            nargs="+",
            metavar="MODULE",
            help="layer specification by module path",
            refused="the layer specification is chosen by the other model flags here",
        ),
    ),
)
