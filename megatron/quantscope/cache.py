"""Where files live that can be made again: downloads, imported models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

APPLICATION = "quantscope"


def cache_dir() -> Path:
    """$QUANTSCOPE_CACHE, else $XDG_CACHE_HOME/quantscope, else ~/.cache/quantscope; it need not exist yet."""
    if own := os.environ.get("QUANTSCOPE_CACHE"):
        return Path(own).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser().absolute() / APPLICATION
    return Path.home() / ".cache" / APPLICATION
