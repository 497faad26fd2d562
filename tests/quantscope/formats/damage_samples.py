"""Tensors for the tests of what formats do: ordinary ones, and ones with all that can go wrong."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, spread: float = 4.0, seed: int = 0) -> Tensor:
    """Each row, and in it each 16 elements, of another magnitude; zeros of both signs among them."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=numbers)
    places = torch.arange(shape[-1]) // 16
    exponents = spread * torch.randn((*shape[:-1], int(places[-1]) + 1), generator=numbers)
    x = (x * torch.exp2(exponents)[..., places]).to(dtype)
    x.view(-1)[3::19], x.view(-1)[5::37] = 0.0, -0.0
    return x


def with_odd_blocks(dtype: torch.dtype) -> Tensor:
    """Blocks with NaN and Inf, whole and ragged, of zeros, of subnormals, of the largest numbers."""
    x = gaussian(7, 70, seed=1).to(dtype)
    info = torch.finfo(dtype)
    x[0, 5], x[1, 40], x[2, 69], x[2, 0], x[3, 31] = math.nan, math.inf, -math.inf, math.nan, math.nan
    x[4] = 0.0
    x[5] *= info.smallest_normal
    x[6] = x[6].sign() * info.max
    return x


SAMPLES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "ordinary": lambda dtype: gaussian(5, 70, dtype=dtype),
    "spread": lambda dtype: gaussian(3, 45, dtype=torch.float64, spread=8.0, seed=2).clamp(-6e4, 6e4).to(dtype),
    "odd blocks": with_odd_blocks,
}
