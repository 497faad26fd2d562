"""Tensors of any bits of a dtype, for hypothesis: everything that a scale has to cope with, alone and in one block."""

import numpy as np
import torch
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

FRACTION_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}
DTYPES = tuple(FRACTION_BITS)
FLOAT64_ENDS = tuple(int(np.float64(end).view(np.uint64)) for end in (2.0**-150, 2.0**129))  # about those of float32


def kinds_of_magnitude(draw: strategies.DrawFn, dtype: torch.dtype) -> dict[str, strategies.SearchStrategy[int]]:
    """Bit patterns of a dtype without sign. The pattern of its smallest normal number is `one`."""
    width = 8 * dtype.itemsize
    one = 1 << FRACTION_BITS[dtype]
    inf = (1 << (width - 1)) - one
    lowest, highest = FLOAT64_ENDS if dtype == torch.float64 else (one, inf - 1)
    amax = draw(strategies.integers(lowest, highest))
    return {
        "zero": strategies.just(0),
        "up to twelve binades below an amax": strategies.integers(max(0, amax - 12 * one), amax),
        "subnormal or nearly": strategies.sampled_from([1, 2, one // 2, one - 1, one]),
        "tiny": strategies.integers(lowest - one, lowest + 3 * one),
        "huge": strategies.integers(highest - 3 * one, highest),
        "not finite": strategies.sampled_from([inf, inf + 1, inf + one // 2]),
        "any": strategies.integers(0, (1 << (width - 1)) - 1),
    }


@strategies.composite
def any_rows(draw: strategies.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """Up to 3 rows of up to 70: blocks that are all zero, subnormal, huge, not finite, short, or all of it in one."""
    kinds = kinds_of_magnitude(draw, dtype)
    chosen = draw(strategies.sets(strategies.sampled_from(sorted(kinds)), min_size=1, max_size=3))
    shape = draw(strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 70)))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    magnitudes = strategies.one_of([kinds[kind] for kind in sorted(chosen)])
    # Without a fill: most elements would be the same one.
    bits = draw(arrays_of.arrays(unsigned, shape, elements=magnitudes, fill=strategies.nothing()))
    signs = draw(arrays_of.arrays(unsigned, shape, elements=strategies.integers(0, 1)))
    bits |= signs << unsigned.type(8 * dtype.itemsize - 1)
    return torch.from_numpy(bits.view(f"i{dtype.itemsize}")).view(dtype)
