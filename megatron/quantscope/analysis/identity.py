"""What a row of the summary was measured from, as one string: the column `key`.

Two records with equal keys have equal figures, so a tensor whose key is known is not read again. A key stands for

    the content     the manifest's checksum of the tensor's bytes, wherever they lie; without one, as for bare files:
                    path, size and time of change of the file
    its part        what blocks run along and what is shown follow from role, shape and dtype
    VERSION         what this program makes of it

With a checksum a capture may be copied or moved, and the weights that several runs share are read once for all. What
became of a file on disk after it was written is not asked: `python -m megatron.quantscope.capture verify` is.
"""

from __future__ import annotations

import hashlib
import json
import os

from megatron.quantscope.capture.record import TensorRecord

KEY = "key"  # the column of the summary table
VERSION = 2  # to be raised whenever the figures of a row change: rows of another version are measured again
_KEY_BYTES = 16
_PART = ("layer_type", "operation", "tensor_name", "shape", "dtype", "head_dim")


def key_of(record: TensorRecord) -> str | None:
    """The key of a record; None when its file can not be found, so that nothing can be said of what it holds."""
    try:
        content = _content(record)
    except OSError:
        return None
    part = [getattr(record, name, None) for name in _PART]
    text = json.dumps([VERSION, content, part])
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).hexdigest()


def _content(record: TensorRecord) -> object:
    if record.path is None:  # statistics alone: the manifest's row is the content
        return [str(record.run_folder), record.rank, record.counter]
    status = record.path.stat()
    if record.checksum is not None:
        return record.checksum
    return [os.path.abspath(record.path), record.offset, status.st_size, status.st_mtime_ns]
