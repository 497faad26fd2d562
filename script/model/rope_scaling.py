"""Llama 3.1's stretch of the rotary frequencies, in the one setting that megatron-core computes.

Frequency i of a head of width d is base^(-2i/d), its wavelength 2 pi / frequency. Waves shorter than
ORIGINAL_CONTEXT / HIGH_FREQUENCY_FACTOR stay, waves longer than ORIGINAL_CONTEXT / LOW_FREQUENCY_FACTOR are stretched
by `factor`, those between by a mixture (Llama Team, "The Llama 3 Herd of Models", and the reference code beside it).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ORIGINAL_CONTEXT = 8192
LOW_FREQUENCY_FACTOR = 1.0
HIGH_FREQUENCY_FACTOR = 4.0


def llama3_divisors(head_width: int, rotary_base: float, factor: float) -> np.ndarray:
    """What each of the head_width / 2 rotary frequencies is divided by, float64."""
    import numpy as np

    frequencies = rotary_base ** (-np.arange(0, head_width, 2) / head_width)
    turns = ORIGINAL_CONTEXT * frequencies / (2 * math.pi)
    kept = np.clip((turns - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR), 0, 1)
    return 1 / ((1 - kept) / factor + kept)
