"""Modules, kernels and recomputation that can not be combined."""

from __future__ import annotations

from megatron.training.checks.table import Check

KERNEL_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.recompute_granularity == "full" and not (a.recompute_method and a.recompute_num_layers),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
    ),
    (
        lambda a: a.attention_backend in ("flash", "fused"),
        "--attention-backend {attention_backend} is not supported yet; allowed are auto, unfused and local",
    ),
)
