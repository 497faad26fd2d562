"""Which module gets which formats, by rules over its name: the first rule that matches it says so.

A rule names modules by shell patterns, which are held against the whole name (`decoder.layers.3.mlp.linear_fc1`) and
against its last part (`linear_fc1`), and layers by number. What no rule matches has the default. Modules outside the
layers are different: the LM head is the largest GEMM and the one that formats hurt most, so no wildcard takes it along;
it is quantised only by a pattern in which its name, `output_layer`, is spelled out.

A pattern that never is a module's first match is a slip of the pen. The model of one rank can not tell: a pattern may
be meant for another pipeline stage. So `match` says which pattern it was, and `require_matched` is asked with those of
all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron.quantscope.gemm.setting import Setting

Layers = tuple[tuple[int, int], ...]  # first and last, both included; negative numbers count from the end
Hit = tuple[int, int]  # number of the rule, number of its pattern
EVERYTHING = "*"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        where: File and line, for messages.
        patterns: Of module names.
        layers: Which layers; None: all.
        setting: How the modules are quantised.
    """

    where: str
    patterns: tuple[str, ...] = (EVERYTHING,)
    layers: Layers | None = None
    setting: Setting

    def pattern_of(self, module: str, layer_idx: int | None, num_layers: int) -> int | None:
        """The number of the first pattern that a module matches; None: the rule is not for it."""
        if self.layers is not None and not self._holds(layer_idx, num_layers):
            return None
        return next((i for i, pattern in enumerate(self.patterns) if _matches(pattern, module, layer_idx)), None)

    def beyond(self, num_layers: int) -> str | None:
        """The first layer number that a model of so many layers does not have, or range that is empty in it."""
        for first, last in self.layers or ():
            low, high = (number % num_layers for number in (first, last))
            if not all(-num_layers <= number < num_layers for number in (first, last)) or low > high:
                return str(first) if first == last else f"{first}-{last}"
        return None

    def _holds(self, layer_idx: int | None, num_layers: int) -> bool:
        if layer_idx is None:
            return False
        return any(first % num_layers <= layer_idx <= last % num_layers for first, last in self.layers or ())


@dataclass(frozen=True, kw_only=True)
class ModuleRules:
    """The rules of one recipe file.

    Attributes:
        path: The file, as it was given.
        text: All of it.
        name: What captures of such a run are called.
        default: For the modules in the layers that no rule matches.
        rules: In the order of the file.
    """

    path: str
    text: str
    name: str
    default: Setting
    rules: tuple[Rule, ...]

    def match(self, module: str, layer_idx: int | None, num_layers: int) -> Hit | None:
        """The rule and the pattern that a module belongs to; None: the default.

        Args:
            module: Full name, global layer and expert numbers.
            layer_idx: Its layer from 0; None: it is outside the layers.
            num_layers: Of the whole model.
        """
        for number, rule in enumerate(self.rules):
            pattern = rule.pattern_of(module, layer_idx, num_layers)
            if pattern is not None:
                return number, pattern
        return None

    def setting(self, module: str, layer_idx: int | None, num_layers: int) -> Setting:
        """How a module is quantised; arguments as of `match`."""
        hit = self.match(module, layer_idx, num_layers)
        if hit is not None:
            return self.rules[hit[0]].setting
        return self.default if layer_idx is not None else Setting()

    def require_layers(self, num_layers: int) -> None:
        """Raise ValueError when a rule names a layer that the model does not have."""
        for rule in self.rules:
            number = rule.beyond(num_layers)
            if number is not None:
                raise ValueError(
                    f"{rule.where}: layers {number} is not allowed: the model has layers 0-{num_layers - 1} "
                    f"(or -{num_layers}--1, from the end)"
                )

    def require_matched(self, hits: Collection[Hit], modules: Collection[str]) -> None:
        """Raise ValueError when a pattern is no module's first match.

        Args:
            hits: What `match` said of every module of every rank.
            modules: Their names.
        """
        for number, rule in enumerate(self.rules):
            for place, pattern in enumerate(rule.patterns):
                if (number, place) not in hits:
                    raise ValueError(f"{rule.where}: {_unmatched(rule, pattern, modules)}")


def _matches(pattern: str, module: str, layer_idx: int | None) -> bool:
    last = module.rpartition(".")[2]
    if layer_idx is None and last not in pattern:
        return False
    return fnmatchcase(module, pattern) or fnmatchcase(last, pattern)


def _unmatched(rule: Rule, pattern: str, modules: Collection[str]) -> str:
    what = f"modules {pattern!r}" + (" in these layers" if rule.layers is not None else "")
    if any(_matches(pattern, module, 0) for module in modules):
        return f"{what} matches nothing that an earlier pattern leaves over"
    last_parts = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    return f"{what} matches no module; the model has {', '.join(last_parts)}, such as {next(iter(modules), 'none')}"
