"""From the flags to the formats of every GEMM: which module is quantised, and what its operands become.

One `QuantConfig` a run. It answers for each module, by its name and place in the network, with the formats of its
operands or with None, which means upstream's own path. With the flags that is: type `none`, a scope that leaves the
module out, a skipped layer, or a module outside the transformer layers (the LM head). A recipe file says it by rules
(`module_rules`), and then no flag does. Imports no torch: a wrong value is answered before it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.quantscope.flags.presets import PRESETS
from megatron.quantscope.flags.quantization import (
    GEMMS,
    OPERANDS,
    QUANT_SCOPES,
    QUANT_TYPES,
    QUANTIZATION_FLAGS,
    SCALE_RULES,
    UNQUANTIZED,
)
from megatron.quantscope.gemm.module_rules import Hit, ModuleRules
from megatron.quantscope.gemm.setting import Setting, check_grad_scale, check_one_of

if TYPE_CHECKING:
    from megatron.quantscope.gemm.operands import AttentionQuant, LinearQuant

QUANT_TYPE_VARIABLE = "CUSTOM_QUANT_TYPE"
_PRESET, _RECIPE = "quant_preset", "quant_recipe"


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """What is quantised, and how: the values of the quantisation flags, or the rules of a recipe file.

    Attributes:
        quant_type: Format of the operands, or `none`.
        scope: `linear`, `attention` or `both`.
        backward_type: Format of the gradient operands, or `none`; None: the same as `quant_type`.
        scale_rule: `floor` or `rceil`, for formats with E8M0 scales.
        grad_scale: `none`, `pow2-amax` or a power of two; None: by the backward type.
        operands: Linear operands (x, w, dy) and GEMMs (fprop, dgrad, wgrad) to quantise; naming none of a kind means
            all of that kind.
        skip_first_layers: This many layers at the start are not quantised.
        skip_last_layers: This many layers at the end are not quantised.
        preset: The preset that these values began with; None: there was none.
        rules: Of a recipe file, in place of all of the above; None: there is none.
    """

    quant_type: str = UNQUANTIZED
    scope: str = "both"
    backward_type: str | None = None
    scale_rule: str = "floor"
    grad_scale: str | float | None = None
    operands: tuple[str, ...] = ()
    skip_first_layers: int = 0
    skip_last_layers: int = 0
    preset: str | None = None
    rules: ModuleRules | None = None

    def __post_init__(self) -> None:
        check_one_of("--quant-type", self.quant_type, QUANT_TYPES)
        check_one_of("--quant-backward-type", self._setting.gradient_type, QUANT_TYPES)
        check_one_of("--quant-scope", self.scope, QUANT_SCOPES)
        check_one_of("--quant-scale-rule", self.scale_rule, SCALE_RULES)
        for part in self.operands:
            check_one_of("--quant-operands", part, OPERANDS + GEMMS)
        check_grad_scale(self._setting.resolved_grad_scale)
        if self.skip_first_layers < 0 or self.skip_last_layers < 0:
            raise ValueError("--quant-skip-first-layers and --quant-skip-last-layers must be >= 0")
        if self.quant_type == UNQUANTIZED and self._setting.gradient_type != UNQUANTIZED:
            raise ValueError(f"--quant-backward-type {self.backward_type} needs a --quant-type other than none")

    @classmethod
    def from_namespace(cls, namespace: Namespace) -> QuantConfig:
        """The configuration of parsed flags (`megatron.quantscope.flags.QUANTIZATION_FLAGS`).

        What is given by hand comes before the environment variable CUSTOM_QUANT_TYPE, that before the defaults. Given
        by hand are the flags and, where they say nothing, the preset; or a recipe file, which excludes them.

        Raises:
            ValueError: A value is not allowed; the message says which and what is.
        """
        given = _given(namespace)
        recipe = given.pop(_RECIPE, None)
        if recipe is not None:
            return cls(rules=_rules(recipe, given))
        preset = given.pop(_PRESET, None)
        if preset is not None:
            check_one_of("--quant-preset", preset, tuple(PRESETS))
            if given.get("quant_type") == UNQUANTIZED:
                raise ValueError(f"--quant-type none leaves nothing of --quant-preset {preset}: leave one of them out")
            given = {**PRESETS[preset].flags, **given}
        if "quant_type" not in given:
            given["quant_type"] = _type_of_environment()
        fields = {_FIELDS[name]: value for name, value in given.items()}
        return cls(**fields | {"operands": tuple(fields.get("operands", ())), "preset": preset})

    def write_back(self, namespace: Namespace) -> None:
        """Put the values that hold into the namespace of the flags; a recipe file leaves it as it is."""
        if self.rules is None:
            for name, field in _FIELDS.items():
                setattr(namespace, name, getattr(self, field))

    @property
    def label(self) -> str:
        """The run's quant type, as names of files and folders carry it; with a recipe file its name."""
        return self.quant_type if self.rules is None else self.rules.name

    @property
    def quantizes(self) -> bool:
        """Whether anything can be quantised."""
        if self.rules is None:
            return self.quant_type != UNQUANTIZED
        settings = [self.rules.default, *(rule.setting for rule in self.rules.rules)]
        return any(setting.quant_type != UNQUANTIZED for setting in settings)

    def linear(self, module: str, layer_idx: int | None, num_layers: int) -> LinearQuant | None:
        """The operand formats of a linear layer; None: upstream's own path.

        Args:
            module: Full name with global layer and expert numbers, such as `decoder.layers.3.mlp.linear_fc1`.
            layer_idx: Its transformer layer from 0; None: it is outside the layers.
            num_layers: Of the whole model.
        """
        setting = self._setting_of("linear", module, layer_idx, num_layers)
        return setting.linear()

    def attention(self, module: str, layer_idx: int | None, num_layers: int) -> AttentionQuant | None:
        """The operand formats of a core attention; arguments and result as of `linear`."""
        setting = self._setting_of("attention", module, layer_idx, num_layers)
        return setting.attention()

    def match(self, module: str, layer_idx: int | None, num_layers: int) -> Hit | None:
        """The pattern of the recipe file that a module belongs to; None: none does, or there is no file."""
        return None if self.rules is None else self.rules.match(module, layer_idx, num_layers)

    def describe(self) -> dict[str, Any]:
        """Plain JSON: where the formats come from."""
        if self.rules is not None:
            return {"recipe": {"file": self.rules.path, "name": self.rules.name, "text": self.rules.text}}
        if self.preset is None:
            return {}
        preset = PRESETS[self.preset]
        known = {"name": preset.name, "source": preset.source, "differs": list(preset.differs)}
        return {"preset": known | {"overridden": self._overridden()}}

    def require_layers(self, num_layers: int) -> None:
        """Raise ValueError unless a model of so many layers has what this speaks of."""
        if self.rules is not None:
            self.rules.require_layers(num_layers)
        elif self.quantizes and self.skip_first_layers + self.skip_last_layers >= num_layers:
            raise ValueError(
                f"--quant-skip-first-layers {self.skip_first_layers} and --quant-skip-last-layers "
                f"{self.skip_last_layers} leave none of {num_layers} layers to quantise"
            )

    def _overridden(self) -> dict[str, Any]:
        """Destination of a flag -> value, where that is not what the preset alone comes to."""
        alone = QuantConfig.from_namespace(Namespace(quant_preset=self.preset))
        pairs = {name: (getattr(self, field), getattr(alone, field)) for name, field in _FIELDS.items()}
        values = {name: here for name, (here, there) in pairs.items() if here != there}
        return values | ({"quant_operands": list(self.operands)} if "quant_operands" in values else {})

    @property
    def _setting(self) -> Setting:
        return Setting(
            quant_type=self.quant_type,
            backward_type=self.backward_type,
            scale_rule=self.scale_rule,
            grad_scale=self.grad_scale,
            operands=self.operands,
        )

    def _setting_of(self, kind: str, module: str, layer_idx: int | None, num_layers: int) -> Setting:
        if self.rules is not None:
            return self.rules.setting(module, layer_idx, num_layers)
        if self.scope not in (kind, "both") or layer_idx is None:
            return Setting()
        kept = self.skip_first_layers <= layer_idx < num_layers - self.skip_last_layers
        return self._setting if kept else Setting()


_FIELDS = {
    "quant_type": "quant_type",
    "quant_scope": "scope",
    "quant_backward_type": "backward_type",
    "quant_scale_rule": "scale_rule",
    "quant_grad_scale": "grad_scale",
    "quant_operands": "operands",
    "quant_skip_first_layers": "skip_first_layers",
    "quant_skip_last_layers": "skip_last_layers",
}
"""Destination of a flag -> field."""


def _given(namespace: Namespace) -> dict[str, Any]:
    """Destination -> value of the flags that were given."""
    names = [flag.destination for flag in QUANTIZATION_FLAGS.flags]
    values = {name: getattr(namespace, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _rules(path: str, others: dict[str, Any]) -> ModuleRules:
    """The rules of a recipe file, which must be the only thing that was given."""
    if others:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--quant-recipe {path} says what is quantised how: leave out {flags}, or the recipe")
    from megatron.quantscope.gemm.recipe_file import read_recipe  # yaml is imported where a file is read

    return read_recipe(path)


def _type_of_environment() -> str:
    name = os.environ.get(QUANT_TYPE_VARIABLE) or UNQUANTIZED
    check_one_of(QUANT_TYPE_VARIABLE, name, QUANT_TYPES)
    return name
