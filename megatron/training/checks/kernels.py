"""Modules, kernels and recomputation that can not be combined."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

from megatron.quantscope.flags.quantization import UNQUANTIZED
from megatron.quantscope.gemm.recipe import QuantConfig
from megatron.training.checks.table import Check
from megatron.training.flags.kernels import ENGINE, LOCAL

NOT_QUANTIZED = "--quant-type mxfp8 or fp8_e4m3 quantises the GEMMs of the local layers"
OF_THE_ENGINE = (  # flag, destination, default: without effect on local layers, so given for them they are a mistake
    ("--fp8-format", "fp8", None),
    ("--fp8-recipe", "fp8_recipe", "delayed"),
    ("--fp8-margin", "fp8_margin", 0),
    ("--fp8-interval", "fp8_interval", 1),
    ("--fp8-amax-history-len", "fp8_amax_history_len", 1),
    ("--fp8-amax-compute-algo", "fp8_amax_compute_algo", "most_recent"),
    ("--no-fp8-wgrad", "fp8_wgrad", True),
    ("--tp-only-amax-red", "tp_only_amax_red", False),
    ("--fp8-param-gather", "fp8_param_gather", False),
    ("--first-last-layers-bf16", "first_last_layers_bf16", False),
    ("--num-layers-at-start-in-bf16", "num_layers_at_start_in_bf16", 1),
    ("--num-layers-at-end-in-bf16", "num_layers_at_end_in_bf16", 1),
    ("--fp4-format", "fp4", None),
)


def _given_for_local(destination: str, default: object) -> Callable[[argparse.Namespace], bool]:
    return lambda a: a.transformer_impl == LOCAL and getattr(a, destination) != default


def _engine_is_missing() -> bool:
    return importlib.util.find_spec(ENGINE) is None


def _has_no_probabilities(a: argparse.Namespace) -> bool:
    return a.transformer_impl == ENGINE or a.attention_backend == "flash"


KERNEL_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.recompute_granularity == "full" and not (a.recompute_method and a.recompute_num_layers),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
    ),
    *(
        (
            _given_for_local(destination, default),
            f"{flag} needs --transformer-impl transformer_engine; {NOT_QUANTIZED}",
        )
        for flag, destination, default in OF_THE_ENGINE
    ),
    (
        lambda a: a.attention_backend == "fused" and a.transformer_impl == LOCAL,
        "--attention-backend fused needs --transformer-impl transformer_engine; local has auto, flash and unfused",
    ),
    (
        lambda a: a.attention_backend == "local" and a.transformer_impl == ENGINE,
        "--attention-backend local needs --transformer-impl local; transformer_engine has auto, flash, fused, unfused",
    ),
    (
        lambda a: a.transformer_impl == ENGINE and _engine_is_missing(),
        "--transformer-impl transformer_engine needs the package transformer-engine, which is not installed",
    ),
    (
        lambda a: a.cross_entropy_fusion_impl == "te" and _engine_is_missing(),
        "--cross-entropy-fusion-impl te needs the package transformer-engine, which is not installed",
    ),
    (
        lambda a: a.transformer_impl == ENGINE and a.num_experts and a.tensor_model_parallel_size > 1,
        "--num-experts with --transformer-impl transformer_engine needs --tensor-model-parallel-size 1: how tensors "
        "of split experts lie over ranks is not known to the capture",
    ),
    (
        lambda a: a.fp8 and a.fp4,
        "--fp8-format and --fp4-format exclude each other",
    ),
    (
        lambda a: a.fp8_param_gather and not (a.fp8 and a.use_distributed_optimizer),
        "--fp8-param-gather needs --fp8-format and --use-distributed-optimizer",
    ),
    (
        lambda a: a.fp8 and a.fp8_recipe == "delayed" and a.first_last_layers_bf16,
        "--first-last-layers-bf16 does not go with --fp8-recipe delayed, whose scales are kept for all layers together",
    ),
    (
        lambda a: a.fp8 and a.fp8_recipe == "delayed" and a.tensor_check_interference,
        "--tensor-check-interference trains steps twice, and the amax history of --fp8-recipe delayed has no way back",
    ),
    (
        lambda a: "attention_probs" in (a.tensor_points or ()) and _has_no_probabilities(a),
        "--tensor-points attention_probs needs --transformer-impl local and --attention-backend unfused: fused and "
        "flash kernels hold no probabilities",
    ),
)


def _quantizes(a: argparse.Namespace, *scopes: str) -> bool:
    """Whether flags, preset or environment quantise GEMMs of these scopes; what a recipe file says is known later."""
    config = QuantConfig.from_namespace(a)
    return config.rules is None and config.quant_type != UNQUANTIZED and config.scope in scopes


# For arguments whose quantisation has been checked.
QUANTIZED_KERNEL_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.transformer_impl == ENGINE and _quantizes(a, "linear", "attention", "both"),
        "--quant-type does not go with --transformer-impl transformer_engine, which runs GEMMs of its own; use "
        "--transformer-impl local, or TransformerEngine's --fp8-format",
    ),
    (
        lambda a: a.attention_backend == "flash" and _quantizes(a, "attention", "both"),
        "--attention-backend flash does not go with quantised attention, which runs its own kernel; use "
        "--attention-backend auto, or --quant-scope linear",
    ),
)
