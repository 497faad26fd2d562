"""The two files of a Megatron dataset, looked at before anything maps them.

PREFIX.bin holds the tokens one after the other; PREFIX.idx says where each sequence lies (little endian):

    9 bytes   MMIDIDX 0 0        8 bytes  version 1             1 byte    code of the tokens' dtype
    8 bytes   sequences n        8 bytes  document bounds m     4n bytes  lengths of the sequences (int32)
    8n bytes  their offsets in PREFIX.bin (int64)               8m bytes  document bounds, in sequences (int64)

Upstream maps both files and believes them: a truncated one shows as a crash in the middle of training.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from megatron.training.failure import UsageError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # dtype code -> size
_BYTES_A_SEQUENCE, _BYTES_A_BOUND = 4 + 8, 8
_DTYPE_CODES = {"int32": 4, "uint16": 8}  # of the two that `token_dtype` chooses from
_SHORT_VOCABULARY = 65500  # upstream's bound, with room for special tokens below 2^16


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which megatron-core keeps the tokens of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < _SHORT_VOCABULARY else np.int32)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write the index of a .bin file, each of whose sequences is a document.

    Args:
        path: the .idx file.
        lengths: tokens of each sequence [n], integers.
        dtype: of the tokens, uint16 or int32.
    """
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    with path.open("wb") as stream:
        stream.write(_HEADER.pack(_MAGIC, _VERSION, _DTYPE_CODES[dtype.name], len(lengths), len(lengths) + 1))
        for values, kind in ((lengths, "<i4"), (offsets * dtype.itemsize, "<i8"), (np.arange(len(lengths) + 1), "<i8")):
            stream.write(np.ascontiguousarray(values, kind).data)


def sequence_lengths(prefix: str) -> np.ndarray:
    """Tokens of each sequence in PREFIX.bin [n], int32.

    Raises:
        UsageError: when the files are not a Megatron dataset, are incomplete, or do not belong together.
    """
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    with index.open("rb") as stream:
        head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise UsageError(f"{index} is not the index of a Megatron dataset: it has {len(head)} bytes")
        magic, version, code, sequences, bounds = _HEADER.unpack(head)
        if magic != _MAGIC or version != _VERSION or code not in _TOKEN_BYTES:
            raise UsageError(f"{index} is not the index of a Megatron dataset: its first bytes are {head[:9]!r}")
        _require_size(index, _HEADER.size + sequences * _BYTES_A_SEQUENCE + bounds * _BYTES_A_BOUND)
        lengths = np.fromfile(stream, dtype="<i4", count=sequences)
    _require_size(tokens, int(lengths.sum(dtype=np.int64)) * _TOKEN_BYTES[code])
    return lengths


def _require_size(path: Path, expected: int) -> None:
    present = path.stat().st_size
    if present != expected:
        raise UsageError(
            f"{path} has {present} bytes, its index says {expected}: it is incomplete; make the data again"
        )
