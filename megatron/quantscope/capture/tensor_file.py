"""Opening one captured file, whoever wrote it: `{"tensor": ..., "metadata": {...}}` or a bare tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.errors import CaptureError

if TYPE_CHECKING:
    import torch

_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"  # begins the zip's last record, which torch writes without a comment
_ZIP_END_BYTES = 22
_OLD_FORMAT_START = b"\x80"  # torch's format before 1.6: bare pickles, which weights_only reads too


def damage(path: Path) -> str | None:
    """What is visibly wrong with a file without reading its tensor; None: nothing.

    A file that was cut short lacks the end of its zip archive, so this costs two small reads.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(_ZIP_START))
            if start != _ZIP_START:
                return None if start[:1] == _OLD_FORMAT_START else "is not a torch file" if start else "is empty"
            file.seek(-_ZIP_END_BYTES, os.SEEK_END)
            return None if file.read(len(_ZIP_END)) == _ZIP_END else "is truncated"
    except OSError as error:
        return f"can not be read: {error.strerror or error}"


def load_file(path: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tensor, memory-mapped on the CPU where the format allows, and the metadata ({} for a bare tensor).

    Raises:
        CaptureError: when the file is missing, damaged, or holds no tensor.
    """
    import torch

    wrong = damage(path)
    if wrong:
        raise CaptureError(f"{path} {wrong}")
    try:
        with open(path, "rb") as file:
            mapped = file.read(len(_ZIP_START)) == _ZIP_START
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds; each of them means the same here
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CaptureError(f"{path} can not be loaded: {reason}") from error
    if isinstance(content, torch.Tensor):
        return content, {}
    if isinstance(content, dict) and isinstance(content.get("tensor"), torch.Tensor):
        metadata = content.get("metadata")
        return content["tensor"], metadata if isinstance(metadata, dict) else {}
    raise CaptureError(f"{path} holds no tensor: a capture is a tensor or a dict with the key 'tensor'")
