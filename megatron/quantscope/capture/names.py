"""The names of captured files: built from checked parts, read back in all three forms that exist.

    full     {stamp}_{counter:04d}_iter{iteration:03d}_{layer_type}_L{layer_idx}_{operation}_{phase}_{component}_
             {quant_type}_rank{rank}_sample{sample_idx}_{tensor_name}.pt
    phased   {stamp}_{counter}_{layer_type}_L{layer_idx}_{operation}_{phase}_{component}_{quant_type}_{tensor_name}.pt
    plain    {stamp}_{counter}_{layer_type}_L{layer_idx}_{operation}_{quant_type}_{tensor_name}.pt

Only `full` is written. A module outside the layers has no `L` part. Parts are joined by `_` and some hold one
themselves (`mxfp8_e5m2`, `grad_output`), so a name is read by trying patterns from the strictest vocabulary (known
operations, phases and quant types) to the loosest. Where even that leaves two readings, the metadata inside the file
is the truth; the name is its summary.

The two older forms call a gradient by the tensor it belongs to; `CaptureName.canonical_tensor_name` says what it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from megatron.quantscope.capture.errors import CaptureUsageError
from megatron.quantscope.capture.metadata import OPERATIONS, PHASES
from megatron.quantscope.flags.quantization import QUANT_TYPES

SUFFIX = ".pt"
LONGEST_NAME = 200  # bytes; file systems take 255, and the rest is room for tools that append to names

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_STAMP = re.compile(r"\d{8}_\d{6}", re.ASCII)
_TEXT_PARTS = ("layer_type", "operation", "phase", "component", "quant_type", "tensor_name")
_SINGLE_WORDS = ("operation", "phase")  # without `_`: what tells the parts before and after them apart
_NUMBERS = ("counter", "iteration", "layer_idx", "rank", "sample_idx")

_CHECKED: set[tuple[str, object]] = set()  # parts that were found right: a run's rows use a few, over and over
_MOST_CHECKED = 4096

_OLD_TENSOR_NAMES = {
    ("linear", "backward", "input"): "grad_output",
    ("linear", "backward", "output"): "grad_input",
    ("attention", "backward", "input"): "grad_output",
    ("attention", "backward", "output"): "grad_input",
    ("attention", "forward", "context"): "output",
}


@dataclass(frozen=True, kw_only=True)
class CaptureName:
    """The parts of one file name; None for those that an older form does not have.

    Attributes:
        stamp: Local time of the save, `YYYYmmdd_HHMMSS`.
        counter: Number of the save; grows per rank.
        layer_type, operation, quant_type, tensor_name, layer_idx, phase, component: As in the metadata.
        iteration, rank, sample_idx: As in the metadata; the full form alone has them.
    """

    stamp: str
    counter: int
    layer_type: str
    operation: str
    quant_type: str
    tensor_name: str
    layer_idx: int | None = None
    phase: str | None = None
    component: str | None = None
    iteration: int | None = None
    rank: int | None = None
    sample_idx: int | None = None

    def filename(self) -> str:
        """The file name in the full form.

        Raises:
            CaptureUsageError: for a part that is missing or not allowed, and for a name that is too long.
        """
        self._check()
        layer = "" if self.layer_idx is None else f"_L{self.layer_idx}"
        name = (
            f"{self.stamp}_{self.counter:04d}_iter{self.iteration:03d}_{self.layer_type}{layer}_{self.operation}"
            f"_{self.phase}_{self.component}_{self.quant_type}_rank{self.rank}_sample{self.sample_idx}"
            f"_{self.tensor_name}{SUFFIX}"
        )
        if len(name) > LONGEST_NAME:
            raise CaptureUsageError(f"file name {name!r} is longer than {LONGEST_NAME} bytes: give shorter parts")
        return name

    @property
    def canonical_tensor_name(self) -> str:
        """The tensor's name as this tool uses it, also for the older forms."""
        if self.iteration is not None:
            return self.tensor_name
        return _OLD_TENSOR_NAMES.get((self.layer_type, self.operation, self.tensor_name), self.tensor_name)

    def _check(self) -> None:
        if not _STAMP.fullmatch(self.stamp):
            raise CaptureUsageError(f"stamp {self.stamp!r} is not allowed: give YYYYmmdd_HHMMSS")
        parts = vars(self)
        for part in _TEXT_PARTS:
            check_part(part, parts[part])
        for part in _NUMBERS:
            value = parts[part]
            if part == "layer_idx" and value is None:
                continue
            if not isinstance(value, int) or value < 0:
                raise CaptureUsageError(f"{part} {value!r} is not allowed: give a whole number >= 0")


def check_part(part: str, value: object) -> None:
    """Refuse what must not become part of a file name.

    Raises:
        CaptureUsageError: unless `value` is 1 to 64 ASCII letters, digits and `._-` that start with a letter or digit;
            operation and phase hold no `_`.
    """
    if (part, value) in _CHECKED:
        return
    if not isinstance(value, str) or not _PART.fullmatch(value):
        raise CaptureUsageError(
            f"{part} {value!r} is not allowed: give 1 to 64 letters, digits, '.', '_' or '-', first a letter or digit"
        )
    if part in _SINGLE_WORDS and "_" in value:
        raise CaptureUsageError(f"{part} {value!r} is not allowed: give one word without '_'")
    if len(_CHECKED) < _MOST_CHECKED:
        _CHECKED.add((part, value))


def parse_name(filename: str) -> CaptureName | None:
    """The parts of a file name in any of the three forms; None when it has none of them."""
    for pattern in _PATTERNS:
        match = pattern.fullmatch(filename)
        if match:
            parts: dict[str, str] = {name: text for name, text in match.groupdict().items() if text is not None}
            numbers = {name: int(parts.pop(name)) for name in _NUMBERS if name in parts}
            return CaptureName(**parts, **numbers)  # type: ignore[arg-type]  # the patterns' groups are the fields
    return None


def _known(words: tuple[str, ...]) -> str:
    """A pattern of these words, the longest first, so that `mxfp8` does not cut off `mxfp8_e5m2`."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def _patterns() -> tuple[re.Pattern[str], ...]:
    word = r"[^_]+"
    dtypes = ("fp32", "fp64", "float32", "float64", "bfloat16", "float16")  # as a run type without quantisation
    operations, phases = (_known(OPERATIONS), word), (_known(PHASES), word)
    quant_types = (_known(QUANT_TYPES + dtypes), word)
    head = r"(?P<stamp>\d{8}_\d{6})_(?P<counter>\d+)"
    layer = r"_(?P<layer_type>.+?)(?:_L(?P<layer_idx>\d+))?"
    tail = rf"_(?P<tensor_name>.+){re.escape(SUFFIX)}"
    full = [
        rf"{head}_iter(?P<iteration>\d+){layer}_(?P<operation>{operation})_(?P<phase>{phase})_(?P<component>.+?)"
        rf"_(?P<quant_type>{quant})_rank(?P<rank>\d+)_sample(?P<sample_idx>\d+){tail}"
        for operation, phase, quant in product(operations, phases, quant_types)
    ]
    phased = [
        rf"{head}{layer}_(?P<operation>{operation})_(?P<phase>{phases[0]})_(?P<component>.+?)_(?P<quant_type>{quant}){tail}"
        for operation, quant in product(operations, quant_types)
    ]
    plain = [
        rf"{head}{layer}_(?P<operation>{operation})_(?P<quant_type>{quant}){tail}"
        for operation, quant in product(operations, quant_types)
    ]
    return tuple(re.compile(pattern, re.ASCII) for pattern in full + phased + plain)


_PATTERNS = _patterns()
