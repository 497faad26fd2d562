"""Flags of mixtures of experts: Megatron-LM's names for fields of megatron-core's TransformerConfig."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import positive_float, positive_int
from megatron.training.flags.values import finite_float, layer_pattern, non_negative_float

LOAD_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
DISPATCHERS = ("allgather", "alltoall", "flex")

EXPERT_FLAGS = FlagGroup(
    "mixtures of experts",
    (
        Flag(name="--num-experts", type=positive_int, metavar="N", help="experts of a mixture (default: plain MLPs)"),
        Flag(
            name="--moe-layer-freq",
            type=layer_pattern,
            default=1,
            metavar="N|PATTERN",
            help="every N-th layer from the first has experts, or those at the ones of a list such as ([1]*3+[0])*2 "
            "(default 1: all)",
        ),
        Flag(
            name="--moe-ffn-hidden-size",
            type=positive_int,
            metavar="N",
            help="width of each expert (default --ffn-hidden-size)",
        ),
        Flag(
            name="--moe-shared-expert-intermediate-size",
            type=positive_int,
            metavar="N",
            help="width of an expert that every token goes through (default: none)",
        ),
        Flag(name="--moe-router-topk", type=positive_int, default=2, metavar="N", help="experts a token (default 2)"),
        Flag(
            name="--moe-router-score-function",
            choices=("softmax", "sigmoid"),
            default="softmax",
            help="from the router's logits to its scores (default softmax)",
        ),
        Flag(
            name="--moe-router-pre-softmax",
            switch=True,
            default=False,
            help="softmax over all experts before the choice, instead of over the chosen ones after it",
        ),
        Flag(
            name="--moe-router-topk-scaling-factor",
            type=positive_float,
            metavar="X",
            help="the chosen experts' scores are multiplied by this (default: not)",
        ),
        Flag(
            name="--moe-router-num-groups",
            type=positive_int,
            metavar="N",
            help="groups of experts, of which a token takes only some (default: no groups)",
        ),
        Flag(
            name="--moe-router-group-topk",
            type=positive_int,
            metavar="N",
            help="groups a token, with --moe-router-num-groups",
        ),
        Flag(
            name="--moe-router-dtype",
            choices=("fp32", "fp64"),
            help="dtype of the router's GEMM and of the experts' weighted sum (default: the compute dtype)",
        ),
        Flag(
            name="--moe-router-enable-expert-bias",
            switch=True,
            default=False,
            help="balance the experts by a bias of their scores that follows their load; needs sigmoid scores",
        ),
        Flag(
            name="--moe-router-bias-update-rate",
            type=positive_float,
            default=1e-3,
            metavar="X",
            help="step of that bias (default 1e-3)",
        ),
        Flag(
            name="--moe-router-load-balancing-type",
            nargs="+",
            choices=LOAD_BALANCING,
            default="aux_loss",
            help="how the experts' load is balanced (default aux_loss)",
        ),
        Flag(
            name="--moe-aux-loss-coeff",
            nargs="+",
            type=non_negative_float,
            default=0.0,
            metavar="X",
            help="weight of the balancing loss, one for each --moe-router-load-balancing-type (default 0)",
        ),
        Flag(
            name="--moe-z-loss-coeff",
            type=positive_float,
            metavar="X",
            help="weight of the loss that keeps the router's logits small (default: none)",
        ),
        Flag(
            name="--moe-input-jitter-eps",
            type=positive_float,
            metavar="X",
            help="the router's input is multiplied by random numbers in 1 +- X (default: not)",
        ),
        Flag(
            name="--moe-token-dispatcher-type",
            choices=DISPATCHERS,
            default="allgather",
            help="how tokens come to their experts' ranks (default allgather)",
        ),
        Flag(
            name="--moe-expert-capacity-factor",
            type=finite_float,
            metavar="X",
            help="an expert takes at most X times its even share of the tokens, the rest is dropped (default: none is)",
        ),
        Flag(
            name="--moe-pad-expert-input-to-capacity",
            switch=True,
            default=False,
            help="fill each expert's rows with zeros up to its capacity",
        ),
        Flag(
            name="--moe-token-drop-policy",
            choices=("probs", "position"),
            default="probs",
            help="which tokens are dropped: those with the lowest scores or the last ones (default probs)",
        ),
        Flag(
            name="--moe-grouped-gemm",
            switch=True,
            default=False,
            help="one GEMM for all experts of a rank",
            refused="a grouped GEMM gives no expert operands of its own to quantise or keep; leave it out, experts "
            "then run one after the other",
        ),
    ),
)
