"""A tensor as tokens by channels, and what is largest in each.

Outliers of language models sit in few channels and, as massive activations, in few tokens; both show in this view.
Megatron's activations are [sequence, micro-batch, features...]: tokens are the first two dimensions. Of a weight
[out, in] the rows stand in for tokens, and the channels are its input features.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats.patterns import PATTERN_DTYPES

_TOKEN_DIMS = 2
_MAGNITUDE_BITS = 0x7FFF
_CHUNK = 1 << 18  # elements whose magnitudes stay in the cache


def tokens_by_channels(tensor: Tensor) -> Tensor:
    """A view or copy [tokens, channels] of a tensor of any shape."""
    if tensor.dim() <= 1:
        return tensor.reshape(1, -1)
    if tensor.dim() == _TOKEN_DIMS:
        return tensor
    return tensor.flatten(_TOKEN_DIMS).flatten(0, 1)


def channel_amax(tensor: Tensor) -> npt.NDArray[np.float32]:
    """[channels]: the largest |x| of each channel; NaN where a channel holds one, empty where there are no elements."""
    if tensor.numel() == 0:
        return np.zeros(0, dtype=np.float32)
    matrix = tokens_by_channels(tensor.detach())
    largest = reduce(torch.maximum, map(_largest_of_channels, _row_parts(matrix)))
    if matrix.dtype in PATTERN_DTYPES:
        largest = largest.view(matrix.dtype)
    result: npt.NDArray[np.float32] = largest.float().numpy()
    return result


def _row_parts(matrix: Tensor) -> tuple[Tensor, ...]:
    return torch.split(matrix, max(1, _CHUNK // max(1, matrix.shape[1])))


def _largest_of_channels(matrix: Tensor) -> Tensor:
    """[channels] of [tokens, channels]; of bf16 and fp16 their bits, which order as magnitudes do, NaN above all."""
    if matrix.dtype in PATTERN_DTYPES:
        return (matrix.contiguous().view(torch.int16) & _MAGNITUDE_BITS).amax(dim=0)
    return (matrix if matrix.is_floating_point() else matrix.double()).abs().amax(dim=0)


def max_pooled(tensor: Tensor, tokens: int, channels: int) -> npt.NDArray[np.float32]:
    """|x| of a tensor as at most [tokens, channels] tiles, each the largest in it: no outlier is averaged away.

    Non-finite elements count as zero; the statistics count them.
    """
    matrix = tokens_by_channels(tensor.detach())
    height, tiles = len(matrix), min(tokens, len(matrix))
    largest = torch.empty(tiles, matrix.shape[1])
    for tile in range(tiles):
        rows = matrix[tile * height // tiles : -(-(tile + 1) * height // tiles)]
        torch.amax(_finite_magnitudes(rows), dim=0, out=largest[tile])
    width = min(channels, matrix.shape[1])
    pooled: npt.NDArray[np.float32] = torch.nn.functional.adaptive_max_pool1d(largest, width).numpy()
    return pooled


def peak_of(tensor: Tensor) -> tuple[int, int]:
    """(token, channel) of the first of the largest finite |x|."""
    matrix = tokens_by_channels(tensor.detach())
    token, place, largest = 0, (0, 0), -1.0
    for part in _row_parts(matrix):
        magnitudes = _finite_magnitudes(part)
        at = int(magnitudes.argmax())
        row, channel = divmod(at, matrix.shape[1])
        if float(magnitudes[row, channel]) > largest:
            place, largest = (token + row, channel), float(magnitudes[row, channel])
        token += len(part)
    return place


def _finite_magnitudes(matrix: Tensor) -> Tensor:
    """|x| as float32, zero where it is not finite."""
    magnitudes = matrix.float().abs()
    return torch.where(torch.isfinite(magnitudes), magnitudes, 0)


def pooled_channels(values: npt.NDArray[np.float32], tiles: int) -> npt.NDArray[np.float32]:
    """[channels] -> [tiles]: the largest of each run of neighbouring channels; NaN and Inf count as zero."""
    finite = torch.from_numpy(np.where(np.isfinite(values), values, 0).astype(np.float32))
    pooled: npt.NDArray[np.float32] = torch.nn.functional.adaptive_max_pool1d(finite[None], tiles)[0].numpy()
    return pooled
