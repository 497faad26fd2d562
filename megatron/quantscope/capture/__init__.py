"""Capture: keep tensors of a training run on disk, and read them back.

Nothing is imported before it is asked for (PEP 562), so that command-line programs can import this package for its
settings and errors alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.quantscope.capture.config import CaptureConfig
    from megatron.quantscope.capture.coordinates import ParallelCoordinates, new_run_id
    from megatron.quantscope.capture.errors import CaptureError, CaptureUsageError
    from megatron.quantscope.capture.filter import TensorFilter
    from megatron.quantscope.capture.names import CaptureName, parse_name
    from megatron.quantscope.capture.reader import Capture, open_capture
    from megatron.quantscope.capture.record import TensorRecord
    from megatron.quantscope.capture.saver import TensorSaver
    from megatron.quantscope.capture.schedule import Schedule
    from megatron.quantscope.capture.session import CaptureSession, CaptureSummary
    from megatron.quantscope.capture.site import Site
    from megatron.quantscope.capture.state import TensorCollectionState

_MODULES = {
    "Capture": "reader",
    "CaptureConfig": "config",
    "CaptureError": "errors",
    "CaptureName": "names",
    "CaptureSession": "session",
    "CaptureSummary": "session",
    "CaptureUsageError": "errors",
    "ParallelCoordinates": "coordinates",
    "Schedule": "schedule",
    "Site": "site",
    "TensorCollectionState": "state",
    "TensorFilter": "filter",
    "TensorRecord": "record",
    "TensorSaver": "saver",
    "new_run_id": "coordinates",
    "open_capture": "reader",
    "parse_name": "names",
}

__all__ = [
    "Capture",
    "CaptureConfig",
    "CaptureError",
    "CaptureName",
    "CaptureSession",
    "CaptureSummary",
    "CaptureUsageError",
    "ParallelCoordinates",
    "Schedule",
    "Site",
    "TensorCollectionState",
    "TensorFilter",
    "TensorRecord",
    "TensorSaver",
    "new_run_id",
    "open_capture",
    "parse_name",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
