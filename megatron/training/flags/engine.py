"""Flags of TransformerEngine's number formats, for --transformer-impl transformer_engine."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_int

FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")
AMAX_RULES = ("most_recent", "max")
FP4_FORMATS = ("e2m1",)

ENGINE_FLAGS = FlagGroup(
    "TransformerEngine",
    (
        Flag(
            name="--fp8-format",
            dest="fp8",
            choices=FP8_FORMATS,
            help="GEMMs in FP8: e4m3, or hybrid (e5m2 for gradients)",
        ),
        Flag(
            name="--fp8-recipe",
            choices=FP8_RECIPES,
            default="delayed",
            help="how scales are found: delayed (by the amax of steps before, default), tensorwise, mxfp8, blockwise",
        ),
        Flag(name="--fp8-margin", type=int, default=0, metavar="N", help="delayed: scales are 2^N smaller (default 0)"),
        Flag(
            name="--fp8-interval",
            type=positive_int,
            default=1,
            metavar="N",
            help="delayed: steps between new scales; without effect since TransformerEngine 1.8 (default 1)",
        ),
        Flag(
            name="--fp8-amax-history-len",
            type=positive_int,
            default=1,
            metavar="N",
            help="delayed: steps whose amax is kept (default 1)",
        ),
        Flag(
            name="--fp8-amax-compute-algo",
            choices=AMAX_RULES,
            default="most_recent",
            help="delayed: the scale follows the most_recent amax or the max of those kept (default most_recent)",
        ),
        Flag(
            name="--no-fp8-wgrad",
            dest="fp8_wgrad",
            switch=True,
            const=False,
            default=True,
            help="delayed: weight gradients by a GEMM in the compute dtype",
        ),
        Flag(
            name="--tp-only-amax-red",
            switch=True,
            default=False,
            help="the amax is the maximum over tensor (and context) parallel ranks only, not over data parallel ones",
        ),
        Flag(
            name="--fp8-param-gather",
            switch=True,
            default=False,
            help="weights exist in FP8 only, and are gathered so; needs --use-distributed-optimizer",
        ),
        Flag(
            name="--reuse-grad-buf-for-mxfp8-param-ag",
            switch=True,
            default=False,
            help="gather MXFP8 weights through the buffer of the gradients",
            refused="the optimizer's step here does not fill that buffer; without it MXFP8 weights take more memory",
        ),
        Flag(
            name="--first-last-layers-bf16",
            switch=True,
            default=False,
            help="first and last layers in the compute dtype",
        ),
        Flag(
            name="--num-layers-at-start-in-bf16",
            type=non_negative_int,
            default=1,
            metavar="N",
            help="how many at the start (default 1)",
        ),
        Flag(
            name="--num-layers-at-end-in-bf16",
            type=non_negative_int,
            default=1,
            metavar="N",
            help="how many at the end (default 1)",
        ),
        Flag(name="--fp4-format", dest="fp4", choices=FP4_FORMATS, help="GEMMs in FP4"),
        Flag(
            name="--fp4-recipe",
            default="nvfp4",
            metavar="NAME",
            help="how scales are found (default nvfp4)",
            refused="only nvfp4 is supported; custom recipes are code of their own",
        ),
        Flag(
            name="--fp4-param-gather",
            switch=True,
            default=False,
            help="weights exist in FP4 only",
            refused="the optimizer's step here has no FP4 weights; --fp4-format alone keeps them in the compute dtype",
        ),
        Flag(
            name="--te-rng-tracker",
            switch=True,
            default=False,
            help="TransformerEngine's generators of random numbers",
            refused="only CUDA graphs need them, and nothing can be captured of a graph's replay, which runs no hooks",
        ),
    ),
)
