"""One record a flag, and the one loop that turns records into an argparse group."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line flag.

    Attributes:
        name: The spelling, with its two dashes.
        help: What it does, in one sentence; argparse appends nothing to it.
        dest: Attribute of the parsed namespace; None: derived from the name.
        type: Converter of the value; None for switches and plain strings.
        default: Value when the flag is absent.
        choices: The allowed values; None: whatever `type` accepts.
        nargs: As in argparse.
        const: For `nargs="?"`, and the value a switch stores.
        switch: True when the flag takes no value and stores `const`.
        refused: Why this flag, though known, can not be honoured; None: it can. A flag with a reason parses, and is
            then refused by name with the reason when it differs from its default.
        metavar: Placeholder of the value in the help text.
    """

    name: str
    help: str
    dest: str | None = None
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: Sequence[Any] | None = None
    nargs: str | int | None = None
    const: Any = True
    switch: bool = False
    refused: str | None = None
    metavar: str | None = None

    @property
    def destination(self) -> str:
        """The attribute of the namespace that holds the value."""
        return self.dest or self.name.lstrip("-").replace("-", "_")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Declare this flag on a parser or an argument group."""
        options: dict[str, Any] = {"dest": self.destination, "default": self.default, "help": self.help}
        if self.switch:
            options |= {"action": "store_const", "const": self.const}
        else:
            options |= {"type": self.type, "choices": self.choices, "nargs": self.nargs, "metavar": self.metavar}
            if self.nargs == "?":
                options["const"] = self.const
        parser.add_argument(self.name, **options)


@dataclass(frozen=True)
class FlagGroup:
    """Flags that belong together, under one title of the help text."""

    title: str
    flags: tuple[Flag, ...]


def add_flags(parser: argparse.ArgumentParser, groups: Sequence[FlagGroup]) -> None:
    """Declare every flag of every group on `parser`, each group under its title."""
    for group in groups:
        section = parser.add_argument_group(group.title)
        for flag in group.flags:
            flag.add_to(section)


def refused_flags(namespace: argparse.Namespace, groups: Sequence[FlagGroup]) -> list[str]:
    """One line for every flag that was set though it can not be honoured: its name and the reason."""
    return [
        f"{flag.name}: {flag.refused}"
        for group in groups
        for flag in group.flags
        if flag.refused and getattr(namespace, flag.destination) != flag.default
    ]
