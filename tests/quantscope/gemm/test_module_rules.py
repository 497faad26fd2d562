"""First match, layers and the LM head, against a slow plain reference; and patterns that match nothing."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.quantscope.gemm.module_rules import ModuleRules, Rule
from megatron.quantscope.gemm.setting import Setting

LAYERS = 4
NAMES = ("self_attention.linear_qkv", "self_attention.core_attention", "mlp.linear_fc1", "mlp.linear_fc2")
MODULES = [(f"decoder.layers.{layer}.{name}", layer) for layer in range(LAYERS) for name in NAMES]
MODULES += [(f"decoder.layers.{LAYERS - 1}.mlp.experts.local_experts.{i}.linear_fc1", LAYERS - 1) for i in range(3)]
MODULES += [("output_layer", None)]


def rules_of(*rules, default="mxfp4"):
    made = [Rule(where=f"r.yaml:{line}", **rule) for line, rule in enumerate(rules, start=1)]
    return ModuleRules(path="r.yaml", text="", name="r", default=Setting(quant_type=default), rules=tuple(made))


def rule(quant_type, *patterns, layers=None):
    return {"patterns": patterns or ("*",), "layers": layers, "setting": Setting(quant_type=quant_type)}


def slow_reference(rules, module, layer):
    """Every rule tried with the plainest means: sets of numbers, and all names that a module goes by."""
    for number, one in enumerate(rules.rules):
        wanted = set(range(LAYERS)) | {None}
        if one.layers is not None:
            wanted = set()
            for first, last in one.layers:
                low, high = [LAYERS + end if end < 0 else end for end in (first, last)]
                wanted |= {n for n in range(LAYERS) if low <= n <= high}
        for place, pattern in enumerate(one.patterns):
            called = [module, module.split(".")[-1]]
            if layer is None and "output_layer" not in pattern:
                called = []
            if layer in wanted and any(fnmatchcase(name, pattern) for name in called):
                return number, place
    return None


PATTERNS = st.sampled_from(
    [
        "*",
        "linear_*",
        "linear_fc?",
        "*.mlp.*",
        "*experts*",
        "decoder.layers.[01].*",
        "output_layer",
        "out*",
        "*layer",
        "nothing",
    ]
)
RANGES = st.tuples(st.integers(-LAYERS, LAYERS - 1), st.integers(-LAYERS, LAYERS - 1))
RULES = st.builds(
    lambda quant_type, patterns, layers: rule(quant_type, *patterns, layers=layers),
    st.sampled_from(["none", "mxfp8", "hifp8"]),
    st.lists(PATTERNS, min_size=1, max_size=3),
    st.none() | st.lists(RANGES, min_size=1, max_size=2).map(tuple),
)


@given(st.lists(RULES, max_size=5))
def test_first_match_is_that_of_the_slow_reference(made):
    rules = rules_of(*made)
    for module, layer in MODULES:
        hit = slow_reference(rules, module, layer)
        assert rules.match(module, layer, LAYERS) == hit
        outside = Setting() if layer is None else rules.default
        assert rules.setting(module, layer, LAYERS) == (outside if hit is None else rules.rules[hit[0]].setting)


@pytest.mark.parametrize("pattern", ["*", "*layer", "out*", "*_l*", "[o]utput*"])
def test_no_wildcard_takes_the_head_along(pattern):
    rules = rules_of(rule("mxfp8", pattern))
    assert rules.match("output_layer", None, LAYERS) is None
    assert rules.setting("output_layer", None, LAYERS) == Setting()


@pytest.mark.parametrize("pattern", ["output_layer", "*output_layer", "output_layer*"])
def test_the_head_is_named_by_spelling_it_out(pattern):
    assert rules_of(rule("mxfp8", pattern)).setting("output_layer", None, LAYERS).quant_type == "mxfp8"
    assert rules_of(rule("mxfp8", pattern, layers=((0, 3),))).setting("output_layer", None, LAYERS) == Setting()


def matched(rules):
    hits = {rules.match(module, layer, LAYERS) for module, layer in MODULES}
    rules.require_matched(hits - {None}, [module for module, _ in MODULES])


def test_patterns_that_all_match_are_fine():
    matched(rules_of(rule("none", layers=((0, 0),)), rule("mxfp8", "linear_fc1", "linear_qkv"), rule("bf16")))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            [rule("mxfp8", "linear_fc1", "linear_fc3")],
            "r.yaml:1: modules 'linear_fc3' matches no module; the model has linear_qkv, core_attention, linear_fc1, "
            "linear_fc2, output_layer, such as decoder.layers.0.self_attention.linear_qkv",
        ),
        ([rule("mxfp8"), rule("bf16", "linear_fc1")], "r.yaml:2: modules 'linear_fc1' matches nothing that an earlier"),
        ([rule("mxfp8", "linear_*", "linear_fc1")], "r.yaml:1: modules 'linear_fc1' matches nothing that an earlier"),
        (
            [rule("mxfp8", layers=((0, 3),)), rule("bf16", layers=((2, 2),))],
            "r.yaml:2: modules '*' in these layers matches nothing that an earlier pattern leaves over",
        ),
    ],
)
def test_a_pattern_that_nothing_matches_first(made, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        matched(rules_of(*made))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [((4, 4),), ((0, 4),), ((-5, -1),), ((3, 1),), ((-1, 0),)])
def test_layers_that_the_model_does_not_have(layers):
    with pytest.raises(ValueError, match=r"r.yaml:1: layers -?\d(--?\d)? is not allowed: the model has layers 0-3"):
        rules_of(rule("mxfp8", layers=layers)).require_layers(LAYERS)
    rules_of(rule("mxfp8", layers=((0, 3), (-4, -1), (-2, 3)))).require_layers(LAYERS)
