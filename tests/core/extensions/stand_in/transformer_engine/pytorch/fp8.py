"""Whether GEMM operands are rounded to FP8 now."""

import contextlib

import torch

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class FP8GlobalStateManager:
    enabled = False
    recipe = None

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls):
        return cls.recipe


@contextlib.contextmanager
def fp8_autocast(
    enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, recipe=None, amax_reduction_group=None
):
    state = FP8GlobalStateManager
    before = state.enabled, state.recipe
    state.enabled, state.recipe = enabled, fp8_recipe or recipe
    try:
        yield
    finally:
        state.enabled, state.recipe = before


def fp8_model_init(enabled=True, recipe=None):
    return contextlib.nullcontext()


def rounded(tensor):
    """`tensor` as FP8 holds it, one scale for all of it; itself where FP8 is off."""
    if not FP8GlobalStateManager.enabled:
        return tensor
    scale = LARGEST / tensor.abs().max().clamp_min(1e-12)
    return (tensor * scale).to(torch.float8_e4m3fn).to(tensor.dtype) / scale
