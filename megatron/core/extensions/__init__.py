"""Upstream's `megatron.core.extensions` with this tree's files laid over it (see `_overlay`)."""

from megatron.core import _overlay

_overlay.package(globals())
