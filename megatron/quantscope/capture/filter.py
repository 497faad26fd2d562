"""Which tensors are kept: the words of `--tensor-filter`, parsed once and asked often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron.quantscope.capture.errors import CaptureUsageError
from megatron.quantscope.capture.metadata import OPERATIONS, TENSOR_NAMES
from megatron.quantscope.capture.ranges import Ranges, in_ranges, parse_ranges

LM_HEAD, LINEAR = "output_layer", "linear"  # by far the largest GEMM: kept only when the filter's modules name it


@dataclass(frozen=True, kw_only=True)
class TensorFilter:
    """A tensor is kept when it matches every key that is given; None: the key was not given.

    Attributes:
        layers: Ranges of global layer numbers; a module outside the layers never matches.
        modules: Shell patterns of module names, matched against the whole name and against its last part.
        tensors: Shell patterns of tensor names.
        operations: "forward", "backward" or both.
        ranks: Ranges of global ranks.
    """

    layers: Ranges | None = None
    modules: tuple[str, ...] | None = None
    tensors: tuple[str, ...] | None = None
    operations: tuple[str, ...] | None = None
    ranks: Ranges | None = None

    @classmethod
    def parse(cls, words: Sequence[str] | None) -> TensorFilter:
        """The filter that words such as `layers=0-3,10` and `tensors=input,grad_*` describe.

        Raises:
            CaptureUsageError: for a word that is not KEY=VALUES, an unknown key, a key given twice, or a value that can
                match nothing.
        """
        found: dict[str, Any] = {}
        for word in words or ():
            key, equals, values = word.partition("=")
            if key not in _PARSERS:
                raise CaptureUsageError(f"--tensor-filter {word!r} is not allowed: give {_ALLOWED}")
            if not equals or not values:
                raise CaptureUsageError(f"--tensor-filter {word!r} has no values: give {key}=VALUE[,VALUE]")
            if key in found:
                raise CaptureUsageError(f"--tensor-filter gives {key} twice: join the values by commas")
            found[key] = _PARSERS[key](key, values.split(","))
        return cls(**found)

    def keeps_rank(self, rank: int) -> bool:
        """Whether anything of this rank is kept."""
        return self.ranks is None or in_ranges(self.ranks, rank)

    def keeps_module(self, module: str, layer_idx: int | None, layer_type: str = LINEAR) -> bool:
        """Whether anything of a module is kept; of the LM head its GEMM is only where `modules` matches it."""
        if self.modules is None:
            named = (_last_part(module), layer_type) != (LM_HEAD, LINEAR)
        else:
            named = any(fnmatchcase(name, p) for p in self.modules for name in (module, _last_part(module)))
        return named and (self.layers is None or (layer_idx is not None and in_ranges(self.layers, layer_idx)))

    def keeps_tensor(self, operation: str, tensor_name: str) -> bool:
        """Whether one tensor of a kept module is kept."""
        return (self.operations is None or operation in self.operations) and (
            self.tensors is None or any(fnmatchcase(tensor_name, pattern) for pattern in self.tensors)
        )

    def kept_ranks(self, world_size: int) -> int:
        """How many of a run's ranks keep anything."""
        return sum(map(self.keeps_rank, range(world_size)))


def _last_part(module: str) -> str:
    return module.rpartition(".")[2]


def _ranges(key: str, values: Sequence[str]) -> Ranges:
    """`0-3` and `10` as ranges."""
    try:
        return parse_ranges(",".join(values))
    except ValueError as error:
        raise CaptureUsageError(f"--tensor-filter {key}={error} is not allowed: give numbers such as 0-3,10") from None


def _patterns(key: str, values: Sequence[str]) -> tuple[str, ...]:
    return tuple(values)


def _patterns_of(known: Sequence[str]) -> Callable[[str, Sequence[str]], tuple[str, ...]]:
    """A parser of patterns each of which must match one of the `known` names, so that a slip of the pen is noticed."""

    def parse(key: str, values: Sequence[str]) -> tuple[str, ...]:
        for value in values:
            if not any(fnmatchcase(name, value) for name in known):
                allowed = ", ".join(known)
                raise CaptureUsageError(f"--tensor-filter {key}={value} matches nothing: allowed are {allowed}")
        return tuple(values)

    return parse


def _names_of(known: Sequence[str]) -> Callable[[str, Sequence[str]], tuple[str, ...]]:
    def parse(key: str, values: Sequence[str]) -> tuple[str, ...]:
        for value in values:
            if value not in known:
                raise CaptureUsageError(f"--tensor-filter {key}={value} is not allowed: give {', '.join(known)}")
        return tuple(values)

    return parse


_PARSERS: dict[str, Callable[[str, Sequence[str]], Any]] = {
    "layers": _ranges,
    "modules": _patterns,
    "tensors": _patterns_of(TENSOR_NAMES),
    "operations": _names_of(OPERATIONS),
    "ranks": _ranges,
}
_ALLOWED = ", ".join(f"{key}=VALUES" for key in _PARSERS)
