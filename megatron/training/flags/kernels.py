"""Flags that say which modules and kernels compute the model, and what is computed twice to save memory."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import positive_int

ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
FP8_RECIPES = (
    "TransformerEngine's FP8 recipes are not supported yet; --quant-type mxfp8 or fp8_e4m3 quantises the GEMMs"
)

KERNEL_FLAGS = FlagGroup(
    "modules and kernels",
    (
        Flag(
            name="--transformer-impl",
            default="local",
            metavar="NAME",
            help="modules that the layers are built of: local (megatron-core's own)",
            refused="only local is supported yet; TransformerEngine's modules can not be quantised or captured",
        ),
        Flag(
            name="--attention-backend",
            choices=ATTENTION_BACKENDS,
            default="auto",
            help="attention kernel: auto, unfused and local are megatron-core's own (default auto)",
        ),
        Flag(
            name="--cross-entropy-loss-fusion",
            switch=True,
            default=False,
            help="megatron-core's fused cross entropy",
        ),
        Flag(
            name="--cross-entropy-fusion-impl",
            default="native",
            metavar="NAME",
            help="native (megatron-core's)",
            refused="only native is supported; te needs TransformerEngine",
        ),
        *(
            Flag(name=f"--no-{kernel}-fusion", dest=dest, switch=True, const=False, default=True, help=text)
            for kernel, dest, text in (
                ("gradient-accumulation", "gradient_accumulation_fusion", "weight gradients by a GEMM of their own"),
                ("masked-softmax", "masked_softmax_fusion", "attention softmax without its fused kernel"),
                ("bias-gelu", "bias_gelu_fusion", "bias and GELU apart"),
                ("bias-swiglu", "bias_swiglu_fusion", "bias and SwiGLU apart"),
                ("bias-dropout", "bias_dropout_fusion", "bias, dropout and residual addition apart"),
                ("rope", "apply_rope_fusion", "rotary positions without their fused kernel"),
            )
        ),
        Flag(
            name="--no-persist-layer-norm",
            switch=True,
            default=False,
            help="accepted and without effect: the persistent kernel is not used",
        ),
        Flag(
            name="--recompute-granularity",
            choices=("full", "selective"),
            help="compute activations again in backward instead of keeping them; not together with --save-tensors",
        ),
        Flag(
            name="--recompute-activations",
            switch=True,
            default=False,
            help="older spelling of --recompute-granularity selective",
        ),
        Flag(
            name="--recompute-method",
            choices=("uniform", "block"),
            help="with full: groups of layers over the whole stage, or its first layers one by one",
        ),
        Flag(
            name="--recompute-num-layers",
            type=positive_int,
            metavar="N",
            help="layers of a group (uniform), or how many are recomputed (block)",
        ),
        Flag(name="--fp8-format", dest="fp8", metavar="NAME", help="FP8 by TransformerEngine", refused=FP8_RECIPES),
        Flag(name="--fp8-recipe", metavar="NAME", help="its scaling recipe", refused=FP8_RECIPES),
        Flag(
            name="--fp8-amax-history-len",
            type=positive_int,
            default=1,
            metavar="N",
            help="its amax history",
            refused=FP8_RECIPES,
        ),
        Flag(
            name="--fp8-amax-compute-algo",
            default="most_recent",
            metavar="NAME",
            help="its amax rule",
            refused=FP8_RECIPES,
        ),
        Flag(name="--fp8-margin", type=int, default=0, metavar="N", help="its scale margin", refused=FP8_RECIPES),
        Flag(name="--fp8-param-gather", switch=True, default=False, help="gather FP8 weights", refused=FP8_RECIPES),
    ),
)
