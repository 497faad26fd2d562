"""Reading a recipe file: YAML to rules, with a line of the file in every complaint.

    name: fp4-with-ends        # what captures are called; letters, digits, '.' and '-' (default: recipe)
    default: mxfp4             # modules in the layers that no rule matches (default: none)
    rules:                     # the first match wins
      - modules: [linear_fc1, "*.self_attention.*"]
        layers: 0-1, -1
        format: mxfp8
        backward_format: mxfp8_e5m2
        scale_rule: rceil
        grad_scale: none
        operands: [x, w, fprop]

A rule needs `format`, and `modules` or `layers`; the other keys are those of the flags. The file is read as a tree of
nodes and never as objects: no tag is honoured, nothing is converted (`0-3` and `none` are text), and an alias, with
which a small file can become a large one, is refused.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron.quantscope.flags.quantization import GEMMS, OPERANDS, QUANT_TYPES, SCALE_RULES, UNQUANTIZED
from megatron.quantscope.flags.values import grad_scale
from megatron.quantscope.gemm.module_rules import EVERYTHING, Layers, ModuleRules, Rule
from megatron.quantscope.gemm.setting import Setting, check_one_of

DEFAULT_NAME = "recipe"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,31}", re.ASCII)  # without `_`, which parts the names of files
_TAKEN = frozenset({*QUANT_TYPES, "fp32", "fp64", "float16", "float32", "float64", "bfloat16", "runs"})
_RANGE = re.compile(r"(-?\d{1,5})(?:-(-?\d{1,5}))?", re.ASCII)
_LARGEST_BYTES = 100_000
_LONGEST_WORD = 200  # characters
_NO_GEMM = "embedding"
_NOTHING = "give at least a default or a rule"
Fields = dict[str, yaml.Node]


class _Loader(yaml.SafeLoader):
    """Composes nodes, and refuses aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(problem="aliases are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)


def read_recipe(path: str) -> ModuleRules:
    """The rules of a recipe file.

    Raises:
        ValueError: One line, with file, line, key and what is allowed.
    """
    text = _text_of(path)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(_not_yaml(path, error)) from None
    except RecursionError:
        raise ValueError(f"--quant-recipe: {path} is nested too deeply") from None
    if root is None:
        raise ValueError(f"--quant-recipe: {path} is empty; {_NOTHING}")
    return _Reader(path).rules_of(root, text)


def _text_of(path: str) -> str:
    try:
        if Path(path).stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"--quant-recipe: {path} is larger than {_LARGEST_BYTES} bytes")
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--quant-recipe: can not read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--quant-recipe: {path} is no UTF-8 text") from None


def _not_yaml(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else path
    problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", None) or "no YAML").split())
    return f"{where}: not YAML: {problem}"


@dataclass(frozen=True)
class _Reader:
    """Makes rules of the nodes of one file."""

    path: str

    def rules_of(self, root: yaml.Node, text: str) -> ModuleRules:
        fields = self._fields(root, ("name", "default", "rules"), "the file")
        if not fields.keys() & {"default", "rules"}:
            self._refuse(root, _NOTHING)
        rules = self._items(fields["rules"], "rules") if "rules" in fields else []
        return ModuleRules(
            path=self.path,
            text=text,
            name=self._name(fields["name"]) if "name" in fields else DEFAULT_NAME,
            default=self._default(fields["default"]) if "default" in fields else Setting(),
            rules=tuple(map(self._rule, rules)),
        )

    def _name(self, node: yaml.Node) -> str:
        name = self._word(node, "name")
        if not _NAME.fullmatch(name):
            self._refuse(node, f"name {name!r} is not allowed: give 1 to 32 letters, digits, '.' or '-'")
        if name.lower() in _TAKEN:
            self._refuse(node, f"name {name!r} is not allowed: a format or folder is called so")
        return name

    def _default(self, node: yaml.Node) -> Setting:
        if isinstance(node, yaml.ScalarNode):
            return Setting(quant_type=self._value("default", node))
        return self._setting(self._fields(node, tuple(_SETTING_KEYS), "default"), node)

    def _rule(self, node: yaml.Node) -> Rule:
        fields = self._fields(node, ("modules", "layers", *_SETTING_KEYS), "a rule")
        if not fields.keys() & {"modules", "layers"}:
            self._refuse(node, "a rule needs modules or layers; what holds for all others is default")
        patterns = tuple(map(self._pattern, self._several(fields["modules"], "modules"))) if "modules" in fields else ()
        layers = self._layers(self._several(fields["layers"], "layers")) if "layers" in fields else None
        setting = self._setting({key: fields[key] for key in fields.keys() & _SETTING_KEYS.keys()}, node)
        return Rule(where=self._where(node), patterns=patterns or (EVERYTHING,), layers=layers, setting=setting)

    def _setting(self, fields: Fields, node: yaml.Node) -> Setting:
        if "format" not in fields:
            self._refuse(node, f"format is missing: choose from {', '.join(QUANT_TYPES)}")
        values = {_SETTING_KEYS[key]: self._value(key, fields[key]) for key in sorted(fields)}
        if values["quant_type"] == UNQUANTIZED and len(values) > 1:
            other = next(key for key in fields if key != "format")
            self._refuse(fields[other], f"{other} is not allowed with format none, which leaves a module as it is")
        return Setting(**values)

    def _value(self, key: str, node: yaml.Node) -> Any:
        words = [self._word(part, key) for part in self._several(node, key)]
        try:
            return _VALUES[key](words)
        except ValueError as error:
            self._refuse(node, str(error))

    def _pattern(self, node: yaml.Node) -> str:
        pattern = self._word(node, "modules")
        if _NO_GEMM in pattern.lower():
            self._refuse(node, f"modules {pattern!r} is not allowed: an embedding looks rows up, it has no GEMM")
        return pattern

    def _layers(self, nodes: list[yaml.Node]) -> Layers:
        found = []
        for node in nodes:
            for part in self._word(node, "layers").split(","):
                match = _RANGE.fullmatch(part.strip())
                if match is None:
                    self._refuse(node, f"layers {part!r} is not allowed: give numbers such as 0-3,28 or -1")
                found.append((int(match[1]), int(match[2] or match[1])))
        return tuple(found)

    def _fields(self, node: yaml.Node, allowed: tuple[str, ...], what: str) -> Fields:
        """A mapping's nodes by key."""
        if not isinstance(node, yaml.MappingNode):
            self._refuse(node, f"{what} must be a mapping with the keys {', '.join(allowed)}")
        fields: Fields = {}
        for key_node, value in node.value:
            key = self._word(key_node, "key")
            if key not in allowed:
                self._refuse(key_node, _unknown(key, allowed))
            if key in fields:
                self._refuse(key_node, f"{key} is given twice")
            fields[key] = value
        return fields

    def _items(self, node: yaml.Node, key: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            self._refuse(node, f"{key} must be a list")
        return list(node.value)

    def _several(self, node: yaml.Node, key: str) -> list[yaml.Node]:
        """The nodes of a list; a single word is a list of one."""
        return [node] if isinstance(node, yaml.ScalarNode) else self._items(node, key)

    def _word(self, node: yaml.Node, key: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, f"{key} must be a word, not a list or mapping")
        if not node.value:
            self._refuse(node, f"{key} has no value")
        if len(node.value) > _LONGEST_WORD:
            self._refuse(node, f"{key} is longer than {_LONGEST_WORD} characters")
        return str(node.value)

    def _where(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}"

    def _refuse(self, node: yaml.Node, message: str) -> NoReturn:
        raise ValueError(f"{self._where(node)}: {message}")


def _one_of(key: str, allowed: tuple[str, ...]) -> Callable[[list[str]], str]:
    def read(words: list[str]) -> str:
        word = _only(key, words)
        check_one_of(key, word, allowed)
        return word

    return read


def _operands(words: list[str]) -> tuple[str, ...]:
    for word in words:
        check_one_of("operands", word, OPERANDS + GEMMS)
    return tuple(words)


def _grad_scale(words: list[str]) -> str | float:
    try:
        return grad_scale(_only("grad_scale", words))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"grad_scale {error}") from None


def _only(key: str, words: list[str]) -> str:
    if len(words) != 1:
        raise ValueError(f"{key} must be one word, not {len(words)}")
    return words[0]


_SETTING_KEYS: Mapping[str, str] = {
    "format": "quant_type",
    "backward_format": "backward_type",
    "scale_rule": "scale_rule",
    "grad_scale": "grad_scale",
    "operands": "operands",
}
_VALUES: Mapping[str, Callable[[list[str]], Any]] = {
    "default": _one_of("default", QUANT_TYPES),
    "format": _one_of("format", QUANT_TYPES),
    "backward_format": _one_of("backward_format", QUANT_TYPES),
    "scale_rule": _one_of("scale_rule", SCALE_RULES),
    "grad_scale": _grad_scale,
    "operands": _operands,
}


def _unknown(key: str, allowed: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else f": allowed are {', '.join(allowed)}"
    return f"unknown key {key!r}{hint}"
