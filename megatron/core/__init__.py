"""Upstream's `megatron.core` with this tree's files laid over it (see `_overlay`)."""

from megatron.core import _overlay, _versions

_overlay.package(globals(), check=_versions.require_supported)
