"""The argument list of Megatron-LM's own Llama example: honoured flag by flag, or refused by name."""

import json
from pathlib import Path

import pytest

from megatron.training.arguments import parse_arguments
from megatron.training.failure import UsageError
from megatron.training.flags import FLAG_GROUPS

RANKS = 8
OF_ENGINE = {  # honoured where TransformerEngine is installed, and asked for
    "--attention-backend", "--fp8-format", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-param-gather",
}  # fmt: skip
DESTINATIONS = {flag.name: flag.destination for group in FLAG_GROUPS for flag in group.flags}


def rows():
    """[flag] or [flag, value] of each line."""
    lines = Path(__file__).with_name("llama3_8b_flags.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def words(chosen):
    return [word for row in chosen for word in row]


WITHOUT_ENGINE = [row for row in rows() if row[0] not in OF_ENGINE]


@pytest.fixture(autouse=True)
def _eight_ranks_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))


@pytest.fixture(scope="module")
def upstream():
    """Flag -> destination and default, as Megatron-LM's parser has them."""
    lines = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    found = (line.split(maxsplit=2) for line in lines if not line.startswith("#"))
    return {flag: (destination, json.loads(default)) for flag, destination, default in found}


def value_of(flag, value, default):
    """What upstream's parser makes of a word: by the type of its own default."""
    if value is None:
        return not default
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value.strip("'")


def test_every_value_arrives(upstream):
    args = vars(parse_arguments(words(WITHOUT_ENGINE)))
    for flag, *value in WITHOUT_ENGINE:
        destination, default = upstream[flag]
        expected = value_of(flag, value[0] if value else None, default)
        if flag == "--sequence-parallel":
            expected = False  # as in Megatron-LM: one tensor parallel rank has nothing to split
        assert args[destination] == expected, flag
    assert args["data_parallel_size"] == RANKS
    assert args["train_iters"] == -(-1953125000 // 128)


@pytest.mark.parametrize("row", [row for row in rows() if row[0] in OF_ENGINE], ids=lambda row: row[0])
def test_what_needs_the_engine_says_so(row):
    with pytest.raises(UsageError) as caught:
        parse_arguments(words([*WITHOUT_ENGINE, row]))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{row[0]} ")
    assert "--transformer-impl transformer_engine" in line


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel_where_there_is_something_to_split(tp):
    parallel = ["--tensor-model-parallel-size", str(tp)]
    args = parse_arguments(words(WITHOUT_ENGINE) + parallel)
    assert (args.sequence_parallel, args.data_parallel_size) == (True, RANKS // tp)


def test_the_list_is_in_our_tables():
    assert {row[0] for row in rows()} <= set(DESTINATIONS)
