"""What a training step came to, to the bit: fingerprints of loss, gradients and parameters, and how two runs compare.

Gradients are taken after the schedule has reduced them and before the optimizer unscales and clips them in place:
clipping multiplies, and the rounding of a product can hide a difference of one ulp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.quantscope.capture.hashing import checksum
from megatron.training.model import unwrap
from megatron.training.steps import Step

PIECE_BYTES = 64 * 2**20  # of a tensor, brought to the host at a time

LOSS, GRADIENT, NORM, PARAMETER = "loss", "gradient", "gradient norm", "parameter"  # in the order they come about

Prints = dict[tuple[str, str], str]  # (kind, name of the tensor or "") -> its bits, or a fingerprint of them


@dataclass(frozen=True)
class StepTrace:
    """One step: what to show of it, and everything to compare."""

    step: Step
    prints: Prints

    def count(self, kind: str) -> int:
        """How many of a kind were looked at."""
        return sum(each == kind for each, _ in self.prints)


@dataclass(frozen=True, order=True)
class Difference:
    """The first thing in which two traces of a rank differ: when, how early in its step, where, and what."""

    step: int
    place: int
    rank: int
    kind: str
    name: str

    def __str__(self) -> str:
        what = f"{self.kind} of {self.name}" if self.name else self.kind
        return f"step {self.step + 1}, {what} on rank {self.rank}"


def gradient_prints(model: list[Any]) -> Prints:
    """Fingerprints of every gradient buffer: DDP's `main_grad` of each parameter."""
    named = ((name, getattr(parameter, "main_grad", None)) for name, parameter in _parameters(model))
    return {(GRADIENT, name): fingerprint(gradient) for name, gradient in named if gradient is not None}


def trace(step: Step, gradients: Prints, model: list[Any]) -> StepTrace:
    """The trace of a step that has just been made.

    Args:
        step: What it came to.
        gradients: Their prints, from before the optimizer's step.
        model: With the parameters of after it.
    """
    parameters: Prints = {}
    for name, parameter in _parameters(model):
        parameters[PARAMETER, name] = fingerprint(parameter)
        copy = getattr(parameter, "main_param", None)
        if copy is not None:
            parameters[PARAMETER, f"{name} (float32 copy)"] = fingerprint(copy)
    loss, norm = {(LOSS, ""): _bits(step.loss)}, {(NORM, ""): _bits(step.grad_norm)}
    return StepTrace(step, loss | gradients | norm | parameters)


def first_difference(one: Sequence[StepTrace], other: Sequence[StepTrace], rank: int) -> Difference | None:
    """Where two runs of the same steps part first; None: nowhere."""
    found = (
        Difference(number, place, rank, *key)
        for number, (left, right) in enumerate(zip(one, other, strict=True))
        for place, key in enumerate(left.prints)
        if left.prints[key] != right.prints.get(key)
    )
    return next(found, None)


def differing(one: StepTrace, other: StepTrace) -> Counter[str]:
    """How many of each kind differ in one step."""
    return Counter(kind for (kind, name), value in one.prints.items() if other.prints.get((kind, name)) != value)


def fingerprint(tensor: torch.Tensor) -> str:
    """A fingerprint of a tensor's bits; one on a GPU is brought to the host in pieces."""
    flat = tensor.detach().reshape(-1)
    pieces = flat.split(max(1, PIECE_BYTES // tensor.element_size()))
    return " ".join(checksum(piece.cpu()) for piece in pieces)


def _parameters(model: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter of this rank, by its name in the model; of several chunks, with the chunk's number."""
    for number, chunk in enumerate(model):
        prefix = "" if len(model) == 1 else f"chunk {number}: "
        for name, parameter in unwrap(chunk).named_parameters():
            yield prefix + name, parameter


def _bits(number: float | None) -> str:
    return "none" if number is None else float(number).hex()
