"""The flag tables against what Megatron-LM's own parser says, and against themselves."""

import json
from pathlib import Path

import pytest

from megatron.training.arguments import build_parser, parse_arguments
from megatron.training.failure import UsageError
from megatron.training.flags import FLAG_GROUPS

FLAGS = {flag.name: flag for group in FLAG_GROUPS for flag in group.flags}
REFUSED = {name: flag for name, flag in FLAGS.items() if flag.refused}
# Ours by intention: no worker processes on a machine without GPU, and evaluation with no interval given.
OTHER_DEFAULTS = {"num_workers": None, "eval_interval": 1000}
SAMPLE_VALUES = {
    "layer_pattern": "3",
    "int": "3",
    "positive_int": "3",
    "non_negative_int": "3",
    "split_weights": "99,1,0",
}


def megatron_flags():
    lines = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split(maxsplit=2) for line in lines if not line.startswith("#"))
    return [(flag, destination, json.loads(default)) for flag, destination, default in rows]


def words_of(flag):
    """An argument list that sets `flag` to something else than its default."""
    if flag.switch:
        return [flag.name]
    if flag.choices:
        value = str(next(choice for choice in flag.choices if choice != flag.default))
    else:
        value = SAMPLE_VALUES.get(getattr(flag.type, "__name__", "str"), "0.5")
    return [flag.name, *[value] * (flag.nargs if isinstance(flag.nargs, int) else 1)]


@pytest.mark.parametrize(("name", "destination", "default"), megatron_flags())
def test_flag_of_megatron_has_its_destination_and_default(name, destination, default):
    absent = vars(build_parser().parse_args([]))
    expected = OTHER_DEFAULTS.get(destination, default)
    assert (absent[destination], isinstance(absent[destination], bool)) == (expected, isinstance(expected, bool))
    given = vars(build_parser().parse_args(words_of(FLAGS[name])))
    changed = {key for key, value in given.items() if value != absent[key]}
    assert changed == {destination}


def test_the_list_of_megatron_flags_is_whole():
    names = [name for name, _, _ in megatron_flags()]
    assert len(names) >= 103
    assert names == sorted(set(names))


def test_names_and_destinations_are_unique():
    flags = [flag for group in FLAG_GROUPS for flag in group.flags]
    assert len({flag.name for flag in flags}) == len(flags)
    assert len({flag.destination for flag in flags}) == len(flags)


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_every_flag_parses_and_says_what_it_does(flag):
    parsed = vars(build_parser().parse_args(words_of(flag)))
    assert parsed[flag.destination] != flag.default
    assert flag.help.strip()


@pytest.mark.parametrize("flag", REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_flag_and_the_reason(flag, command):
    with pytest.raises(UsageError) as caught:
        parse_arguments(command() + words_of(flag))
    assert str(caught.value).splitlines() == [f"{flag.name}: {flag.refused}"]


def test_a_refused_flag_with_its_default_value_is_let_through(command):
    args = parse_arguments([*command(), "--transformer-impl", "local", "--context-parallel-size", "1"])
    assert (args.transformer_impl, args.context_parallel_size) == ("local", 1)


def test_choices_and_defaults_agree():
    for flag in FLAGS.values():
        if flag.choices and flag.default is not None:
            assert flag.default in flag.choices, flag.name


def test_group_titles_are_unique():
    titles = [group.title for group in FLAG_GROUPS]
    assert len(set(titles)) == len(titles)
