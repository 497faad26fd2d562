"""Flags that say which modules and kernels compute the model, and what is computed twice to save memory."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import positive_int

LOCAL, ENGINE = "local", "transformer_engine"
TRANSFORMER_IMPLS = (LOCAL, ENGINE)
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")

KERNEL_FLAGS = FlagGroup(
    "modules and kernels",
    (
        Flag(
            name="--transformer-impl",
            choices=TRANSFORMER_IMPLS,
            default=LOCAL,
            help="modules that the layers are built of: local (megatron-core's own, default) or transformer_engine",
        ),
        Flag(
            name="--attention-backend",
            choices=ATTENTION_BACKENDS,
            default="auto",
            help="attention kernel: of local layers auto, unfused and local are megatron-core's own, flash is "
            "flash-attn's or torch's; TransformerEngine chooses among its own (default auto)",
        ),
        Flag(
            name="--cross-entropy-loss-fusion",
            switch=True,
            default=False,
            help="megatron-core's fused cross entropy",
        ),
        Flag(
            name="--cross-entropy-fusion-impl",
            choices=("native", "te"),
            default="native",
            help="whose fused cross entropy: native (megatron-core's, default) or te (TransformerEngine's)",
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
            help="compute activations again in backward instead of keeping them",
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
    ),
)
