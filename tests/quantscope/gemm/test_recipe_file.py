"""What a recipe file may say, and the one line for everything that it may not."""

import argparse

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.quantscope.gemm import QuantConfig
from megatron.quantscope.gemm.module_rules import ModuleRules
from megatron.quantscope.gemm.recipe_file import read_recipe
from megatron.quantscope.gemm.setting import Setting


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read(text)` -> the rules of a file r.yaml of this text."""
    monkeypatch.chdir(tmp_path)

    def rules(text):
        (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
        return read_recipe("r.yaml")

    return rules


def test_everything_that_a_file_can_say(read):
    rules = read(
        """\
name: ends.2
default: {format: mxfp4, scale_rule: rceil}
rules:
  - modules: output_layer
    format: mxfp8
    backward_format: mxfp8_e5m2
    grad_scale: 1024
    operands: [x, w, fprop]
  - modules: [linear_fc1, "*.linear_fc2"]
    layers: 0-1, -1
    format: none
  - layers: [2, 3-4]
    format: hifp8
    grad_scale: none
"""
    )
    assert (rules.name, rules.path, rules.default) == (
        "ends.2",
        "r.yaml",
        Setting(quant_type="mxfp4", scale_rule="rceil"),
    )
    head, ends, middle = rules.rules
    assert head.setting == Setting(
        quant_type="mxfp8", backward_type="mxfp8_e5m2", grad_scale=1024.0, operands=("x", "w", "fprop")
    )
    assert (head.where, head.patterns, head.layers) == ("r.yaml:4", ("output_layer",), None)
    assert (ends.patterns, ends.layers) == (("linear_fc1", "*.linear_fc2"), ((0, 1), (-1, -1)))
    assert ends.setting == Setting()
    assert (middle.patterns, middle.layers) == (("*",), ((2, 2), (3, 4)))
    assert middle.setting == Setting(quant_type="hifp8", grad_scale="none")


def test_short_forms(read):
    assert read("default: mxfp8").default == Setting(quant_type="mxfp8")
    rules = read("rules: [{modules: linear_fc1, format: mxfp4, operands: wgrad}]")
    assert (rules.name, rules.default, rules.rules[0].setting.operands) == ("recipe", Setting(), ("wgrad",))


RULE = "rules:\n  - modules: linear_fc1\n"
BAD = [
    ("", "--quant-recipe: r.yaml is empty; give at least a default or a rule"),
    ("# nothing\n", "--quant-recipe: r.yaml is empty; give at least a default or a rule"),
    ("name: foo", "r.yaml:1: give at least a default or a rule"),
    ("{}", "r.yaml:1: give at least a default or a rule"),
    ("mxfp8", "r.yaml:1: the file must be a mapping with the keys name, default, rules"),
    ("- mxfp8", "r.yaml:1: the file must be a mapping with the keys name, default, rules"),
    ("rule: []", "r.yaml:1: unknown key 'rule'; did you mean rules?"),
    ("colour: red", "r.yaml:1: unknown key 'colour': allowed are name, default, rules"),
    ("default: none\ndefault: mxfp8", "r.yaml:2: default is given twice"),
    ("default:", "r.yaml:1: default has no value"),
    ("default: mxfp9", "r.yaml:1: default 'mxfp9' is not allowed: choose from none, bf16, fp16, mxfp8"),
    ("default: [mxfp8]", "r.yaml:1: default must be a mapping with the keys format, backward_format, scale_rule"),
    ("rules: {}", "r.yaml:1: rules must be a list"),
    ("rules: []", "r.yaml:1: rules must be a list"),
    ("rules: [mxfp8]", "r.yaml:1: a rule must be a mapping with the keys modules, layers, format"),
    ("rules: [{format: mxfp8}]", "r.yaml:1: a rule needs modules or layers; what holds for all others is default"),
    (RULE, "r.yaml:2: format is missing: choose from none, bf16"),
    (RULE + "    fromat: mxfp8", "r.yaml:3: unknown key 'fromat'; did you mean format?"),
    (RULE + "    format: mxfp8\n    format: mxfp4", "r.yaml:4: format is given twice"),
    (RULE + "    format: mxfp8\n    backward_format: e5m2", "r.yaml:4: backward_format 'e5m2' is not allowed: choose"),
    (
        RULE + "    format: mxfp8\n    scale_rule: up",
        "r.yaml:4: scale_rule 'up' is not allowed: choose from floor, rceil",
    ),
    (
        RULE + "    format: mxfp8\n    grad_scale: 3",
        "r.yaml:4: grad_scale '3' is not allowed: give none, pow2-amax or a power of two",
    ),
    (
        RULE + "    format: mxfp8\n    operands: [x, y]",
        "r.yaml:4: operands 'y' is not allowed: choose from x, w, dy, fprop, dgrad, wgrad",
    ),
    (RULE + "    format: none\n    scale_rule: rceil", "r.yaml:4: scale_rule is not allowed with format none"),
    (RULE + "    format: [mxfp8, mxfp4]", "r.yaml:3: format must be one word, not 2"),
    (RULE + "    format: {a: b}", "r.yaml:3: format must be a list"),
    (
        RULE + "    format: mxfp8\n    layers: 0..3",
        "r.yaml:4: layers '0..3' is not allowed: give numbers such as 0-3,28",
    ),
    (RULE + "    format: mxfp8\n    layers: 1e3", "r.yaml:4: layers '1e3' is not allowed"),
    ("rules: [{modules: [[a]], format: mxfp8}]", "r.yaml:1: modules must be a word, not a list or mapping"),
    ("rules: [{modules: '', format: mxfp8}]", "r.yaml:1: modules has no value"),
    (
        "rules: [{modules: '*word_embeddings', format: mxfp8}]",
        "r.yaml:1: modules '*word_embeddings' is not allowed: an embedding looks rows up, it has no GEMM",
    ),
    (
        "default: none\nname: my_recipe",
        "r.yaml:2: name 'my_recipe' is not allowed: give 1 to 32 letters, digits, '.' or '-'",
    ),
    ("default: none\nname: ../up", "r.yaml:2: name '../up' is not allowed"),
    ("default: none\nname: MXFP8", "r.yaml:2: name 'MXFP8' is not allowed: a format or folder is called so"),
    ("default: none\nname: runs", "r.yaml:2: name 'runs' is not allowed: a format or folder is called so"),
    ("rules: [&a {modules: x, format: mxfp8}, *a]", "r.yaml:1: not YAML: aliases are not allowed"),
    ("default: {format: mxfp8", "r.yaml:1: not YAML: expected ',' or '}'"),
    ("default: none\n\tname: x", "r.yaml:2: not YAML: found character"),
    ("default: none\n---\ndefault: none", "r.yaml:2: not YAML: but found another document"),
    ("? [a]\n: b", "r.yaml:1: key must be a word, not a list or mapping"),
    (f"default: {'m' * 300}", "r.yaml:1: default is longer than 200 characters"),
    ("[" * 2000, "--quant-recipe: r.yaml is nested too deeply"),
    ("default: mxfp8\n" + "#" * 100_001, "--quant-recipe: r.yaml is larger than 100000 bytes"),
    ("default: \x00", "r.yaml: not YAML: special characters are not allowed"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_everything_else_is_refused_in_one_line(read, text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_tags_make_no_objects(read):
    assert read("!!python/object/apply:os.system {default: !!int mxfp8}").default.quant_type == "mxfp8"


def test_a_file_that_can_not_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b"name: \xe4")
    for path, message in (
        (tmp_path / "nowhere", "can not read .*: No such file"),
        (tmp_path, "can not read .*: Is a directory"),
        (tmp_path / "latin", "is no UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=f"^--quant-recipe: .*{message}"):
            read_recipe(str(path))


@pytest.mark.parametrize(
    "flags", [{"quant_type": "mxfp8"}, {"quant_preset": "ocp"}, {"quant_skip_first_layers": 0}, {"quant_scope": "both"}]
)
def test_a_file_excludes_every_flag_that_it_stands_for(tmp_path, flags):
    path = tmp_path / "r.yaml"
    path.write_text("default: mxfp8")
    (name,) = flags
    with pytest.raises(ValueError, match=f"says what is quantised how: leave out --{name.replace('_', '-')}, or the"):
        QuantConfig.from_namespace(argparse.Namespace(quant_recipe=str(path), **flags))


def test_a_file_is_by_hand_and_comes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    path = tmp_path / "r.yaml"
    path.write_text("name: mine\ndefault: mxfp8")
    config = QuantConfig.from_namespace(argparse.Namespace(quant_recipe=str(path)))
    assert (config.label, config.quantizes) == ("mine", True)
    assert config.linear("decoder.layers.0.mlp.linear_fc1", 0, 1).gemms["fprop"] == {"x": "mxfp8", "w": "mxfp8"}
    assert config.describe() == {"recipe": {"file": str(path), "name": "mine", "text": "name: mine\ndefault: mxfp8"}}


WORDS = st.sampled_from(
    ["name", "default", "rules", "modules", "layers", "format", "scale_rule", "operands", "mxfp8", "none", "x", "0-3"]
)
TREES = st.recursive(
    WORDS | st.text(max_size=5) | st.integers() | st.none() | st.floats() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.text() | TREES.map(lambda tree: yaml.dump(tree, allow_unicode=True)))
@example("&a [*a]")
@example("{a: &x [x, x], b: [*x, *x]}")
@example("default: 2020-99-99")
@example("<<: {default: none}")
@example("%YAML 9.9\n---\na")
def test_any_text_is_rules_or_one_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    complaint = ""
    try:
        assert isinstance(read_recipe(str(path)), ModuleRules)
    except ValueError as error:
        complaint = str(error)
    assert not complaint or ("any.yaml" in complaint and len(complaint.splitlines()) == 1)
