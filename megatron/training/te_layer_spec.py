"""`--transformer-impl transformer_engine`: layers of TransformerEngine's modules, and the settings they are built with.

The specification is megatron-core's own. TransformerEngine is imported when a layer is built, and not before: it may
not be there. Its recipes (FP8, MXFP8, NVFP4) are settings of TransformerConfig; megatron-core opens their contexts
around the layers, and nothing here looks at them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import Any

import torch

from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.training.failure import UsageError
from megatron.training.flags.kernels import ENGINE, LOCAL

# Field of TransformerConfig -> flag destination -> flag.
_RECIPE_FLAGS = {
    "fp8": ("fp8", "--fp8-format"),
    "fp8_recipe": ("fp8_recipe", "--fp8-recipe"),
    "fp8_param": ("fp8_param_gather", "--fp8-param-gather"),
    "fp8_margin": ("fp8_margin", "--fp8-margin"),
    "fp8_interval": ("fp8_interval", "--fp8-interval"),
    "fp8_amax_history_len": ("fp8_amax_history_len", "--fp8-amax-history-len"),
    "fp8_amax_compute_algo": ("fp8_amax_compute_algo", "--fp8-amax-compute-algo"),
    "fp8_wgrad": ("fp8_wgrad", "--no-fp8-wgrad"),
    "tp_only_amax_red": ("tp_only_amax_red", "--tp-only-amax-red"),
    "first_last_layers_bf16": ("first_last_layers_bf16", "--first-last-layers-bf16"),
    "num_layers_at_start_in_bf16": ("num_layers_at_start_in_bf16", "--num-layers-at-start-in-bf16"),
    "num_layers_at_end_in_bf16": ("num_layers_at_end_in_bf16", "--num-layers-at-end-in-bf16"),
    "fp4": ("fp4", "--fp4-format"),
    "fp4_recipe": ("fp4_recipe", "--fp4-recipe"),
}


def require_engine(args: argparse.Namespace) -> None:
    """See that what runs on a GPU alone has one; the package was looked for with the command line.

    TransformerEngine is told of --deterministic-mode by a variable of the environment.

    Raises:
        UsageError: when there is none.
    """
    if args.deterministic_mode:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if args.transformer_impl == ENGINE and not has_gpu():
        raise UsageError(f"--transformer-impl {ENGINE} needs a CUDA device, and this machine has none")
    if args.cross_entropy_fusion_impl == "te" and not has_gpu():
        raise UsageError("--cross-entropy-fusion-impl te needs a CUDA device, and this machine has none")


def has_gpu() -> bool:
    """Whether TransformerEngine's kernels can run here."""
    return torch.cuda.is_available()


def te_layer(args: argparse.Namespace, num_experts: int | None) -> ModuleSpec:
    """A layer of TransformerEngine's modules, norms among them; experts run one after the other.

    Raises:
        UsageError: when TransformerEngine can not be used here.
    """
    require_engine(args)
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    if not transformer_engine.HAVE_TE:
        raise UsageError(
            f"--transformer-impl {ENGINE}: the package transformer-engine is there and can not be imported; "
            'python -c "import transformer_engine.pytorch" says why'
        )
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=args.qk_layernorm
    )


def te_norm() -> Any:
    """What builds the norm after the last layer."""
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of TransformerConfig: which modules the layers are built of and, for TransformerEngine's, its settings.

    Raises:
        UsageError: for a flag whose field the installed megatron-core does not have.
    """
    if args.transformer_impl == LOCAL:
        return {"transformer_impl": LOCAL}
    known = {field.name: field.default for field in fields(TransformerConfig)}
    settings = {name: getattr(args, destination) for name, (destination, _) in _RECIPE_FLAGS.items()}
    missing = [
        flag for name, (_, flag) in _RECIPE_FLAGS.items() if name not in known and settings[name] not in (None, "nvfp4")
    ]
    if missing:
        raise UsageError(f"{', '.join(missing)}: the installed megatron-core has no such setting; install a newer one")
    return {
        "transformer_impl": ENGINE,
        "attention_backend": AttnBackend[args.attention_backend],
        **{name: value for name, value in settings.items() if name in known},
    }
