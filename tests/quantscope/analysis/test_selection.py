import argparse

import pytest

from megatron.quantscope.analysis.selection import FILTERS, Selection, add_filters, selection_of
from megatron.quantscope.capture import open_capture
from tests.quantscope.analysis.captures import save, write_capture


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    for quant_type in ("bf16", "mxfp8"):
        write_capture(directory, quant_type, layers=2, ranks=2, iterations=2, micro_batches=2)
    return open_capture(directory)


def selected(words):
    parser = argparse.ArgumentParser()
    add_filters(parser)
    return selection_of(parser.parse_args(words.split()))


# Each is stated by a plain condition on the record beside it.
CASES = {
    "--type mxfp8": lambda r: r.quant_type == "mxfp8",
    "--type mx*,fp16": lambda r: r.quant_type == "mxfp8",
    "--layer 1": lambda r: r.layer_idx == 1,
    "--layer 0-1": lambda r: True,
    "--module fc2": lambda r: r.module.endswith("linear_fc2"),
    "--module linear_fc2,core_attention": lambda r: r.module.endswith(("linear_fc2", "core_attention")),
    "--module decoder.layers.0.*": lambda r: r.layer_idx == 0,
    "--tensor dy": lambda r: (r.layer_type, r.tensor_name) == ("linear", "grad_output"),
    "--tensor grad_output": lambda r: r.tensor_name == "grad_output",
    "--tensor fc2.x,*.w": lambda r: (
        r.tensor_name == "weight" or (r.tensor_name == "input" and r.module.endswith("linear_fc2"))
    ),
    "--operation backward": lambda r: r.operation == "backward",
    "--rank 1": lambda r: r.rank == 1,
    "--iteration 1": lambda r: r.iteration == 1,
    "--micro-batch 0": lambda r: r.micro_batch == 0,
    "--sample 3": lambda r: 3 in r.sample_indices,
    "--rank 0 --layer 1 --tensor fc1.x": lambda r: (
        (r.rank, r.layer_idx, r.tensor_name) == (0, 1, "input") and r.module.endswith("linear_fc1")
    ),
}


@pytest.mark.parametrize("words", CASES)
def test_the_rows_that_match_are_kept(wide, words):
    kept = selected(words).of(wide).records
    assert kept == [record for record in wide.records if CASES[words](record)]
    assert kept


def test_every_filter_is_tried_here():
    assert {f"--{word}" for each in FILTERS for word in [each.name]} <= {word for c in CASES for word in c.split()}


def test_without_filters_everything_is_kept_as_it_is(wide):
    selection = selected("")
    assert not selection
    assert selection.of(wide) is wide
    assert str(selection) == "everything"


def test_losses_and_runs_of_types_that_are_gone_go_too(wide):
    left = selected("--type bf16").of(wide)
    assert set(left.commits) == set(left.run_info) == set(left.runs) == {"bf16"}
    assert wide.runs.keys() == {"bf16", "mxfp8"}


def test_it_is_written_as_one_would_type_it():
    words = "--type mxfp8 --layer 0-3,10 --tensor dy,fc2.*"
    assert str(selected(words)) == words


def test_what_is_not_known_does_not_match(tmp_path, rough):
    save(tmp_path / "20241201_143022_0001_linear_L0_forward_mxfp8_input.pt", rough)
    capture = open_capture(tmp_path)
    assert len(selected("--layer 0").of(capture).records) == 1
    for words in ("--rank 0", "--iteration 0", "--micro-batch 0"):
        assert selected(words).of(capture).records == []


@pytest.mark.parametrize(
    ("words", "reason"), [("--layer 3-1", "'3-1' is not allowed"), ("--tensor a,,b", "'a,,b' is not allowed")]
)
def test_wrong_values_are_named(words, reason, capsys):
    with pytest.raises(SystemExit):
        selected(words)
    assert reason in capsys.readouterr().err


def test_a_selection_made_by_hand_is_the_same(wide):
    assert Selection({"layer": ((1, 1),)}).of(wide).records == selected("--layer 1").of(wide).records
