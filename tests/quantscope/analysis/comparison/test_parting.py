"""Where runs part and how the distance grows, from tables whose numbers are known."""

import math

import numpy as np
import pandas as pd
import pytest

from megatron.quantscope.analysis.comparison import growths, partings, steps, worst
from megatron.quantscope.analysis.comparison.growth import median
from megatron.quantscope.analysis.comparison.parting import BEGINS_TO_PART_DB, PARTED_DB

INF = math.inf


def table_of(*rows, run="mxfp4", baseline="bf16"):
    """Rows of (site, layer, operation, SQNR), in the order of execution."""
    return pd.DataFrame(
        [
            {
                "run": run, "baseline": baseline, "iteration": 0, "micro_batch": 0, "rank": 0.0, "layer_idx": layer,
                "site": site, "family": "weight" if site.endswith(".w") else "activation", "operation": operation,
                "order": order, "equal": sqnr == INF, "sqnr_db": sqnr, "cosine": 0.5,
            }
            for order, (site, layer, operation, sqnr) in enumerate(rows)
        ]
    )  # fmt: skip


EXAMPLE = table_of(
    ("qkv.x", 0, "forward", INF),
    ("qkv.w", 0, "forward", INF),
    ("qkv.y", 0, "forward", 45.0),
    ("fc2.y", 0, "forward", 42.0),
    ("qkv.y", 1, "forward", 35.0),
    ("fc2.y", 1, "forward", 41.0),
    ("fc2.dx", 1, "backward", 20.0),
    ("qkv.dx", 1, "backward", 18.0),
    ("fc2.dx", 0, "backward", 10.0),
    ("qkv.dx", 0, "backward", -INF),
)


def test_the_first_tensors_at_which_something_is_so():
    found = [(one.kind, one.site, one.layer, one.order, one.sqnr_db) for one in partings(EXAMPLE)]
    assert found == [
        ("not equal", "qkv.y", 0, 2, 45.0),
        ("begins to part", "qkv.y", 1, 4, 35.0),
        ("parted", "qkv.dx", 1, 7, 18.0),
    ]
    assert (BEGINS_TO_PART_DB, PARTED_DB) == (40.0, 20.0)


def test_sentences():
    first, begins, _ = partings(EXAMPLE)
    assert first.text == (
        "mxfp4: 8 of 10 tensors are not equal to those of bf16; the first is "
        "qkv.y of layer 0 (forward, iteration 0, micro-batch 0, rank 0), at 45.0 dB."
    )
    assert begins.text.startswith("mxfp4: the first SQNR below 40 dB is that of qkv.y of layer 1 (forward")


def test_the_order_of_the_rows_does_not_matter():
    shuffled = EXAMPLE.sample(frac=1, random_state=0)
    assert partings(shuffled) == partings(EXAMPLE)
    assert growths(shuffled) == growths(EXAMPLE)


def test_a_run_that_is_equal_throughout():
    (found,) = partings(table_of(("qkv.x", 0, "forward", INF), ("qkv.y", 0, "forward", INF)))
    assert (found.kind, found.site, found.layer, found.order) == ("equal", None, None, -1)
    assert found.text == "mxfp4: all 2 tensors are equal to those of bf16, bit by bit."
    assert worst(table_of(("qkv.x", 0, "forward", INF)), 3).empty


def test_what_is_not_known_is_left_out_of_sentences():
    rows = table_of(("linear.x", np.nan, "forward", 12.0)).assign(iteration=np.nan, micro_batch=np.nan, rank=np.nan)
    first, *_ = partings(rows)
    assert (first.layer, first.rank, first.iteration) == (None, None, None)
    assert "the first is linear.x (forward), at 12.0 dB." in first.text
    assert growths(rows) == []


def test_lost_values_are_below_every_threshold():
    found = partings(table_of(("fc2.y", 3, "forward", -INF)))
    assert [one.kind for one in found] == ["not equal", "begins to part", "parted"]
    assert "at an error without bound" in found[0].text


def test_medians_go_up_the_layers_and_down_again():
    forward, backward = growths(EXAMPLE)
    assert (forward.layers, forward.sqnr_db) == ((0, 1), (45.0, 38.0))  # the equal input counts, the weight does not
    assert (backward.layers, backward.sqnr_db) == ((1, 0), (19.0, -INF))
    assert forward.slope_db == pytest.approx(-7.0)
    assert math.isnan(backward.slope_db)
    assert backward.text == (
        "mxfp4, backward: the median SQNR is 19.0 dB in layer 1 and an error without bound in layer 0; "
        "the lowest is an error without bound in layer 0."
    )


def test_the_slope_is_that_of_a_line():
    rows = table_of(*(("fc2.y", layer, "forward", 50.0 - 1.5 * layer) for layer in range(0, 20, 1)))
    (growth,) = growths(rows)
    assert growth.slope_db == pytest.approx(-1.5)
    assert "(-1.50 dB a layer); the lowest is 21.5 dB in layer 19." in growth.text


def test_the_step_into_the_backward_pass():
    (step,) = steps(EXAMPLE)
    assert (step.layer, step.forward_db, step.backward_db) == (1, 38.0, 19.0)
    assert step.text == "mxfp4: from forward to backward, in layer 1, the median SQNR goes from 38.0 dB to 19.0 dB."
    assert steps(EXAMPLE[EXAMPLE["operation"] == "forward"]) == []


def test_later_iterations_are_left_out_of_growth():
    later = EXAMPLE.assign(iteration=1, sqnr_db=-50.0)
    assert growths(pd.concat([EXAMPLE, later])) == growths(EXAMPLE)


def test_runs_are_kept_apart_in_their_order():
    both = pd.concat([EXAMPLE.assign(run="b"), EXAMPLE.assign(run="a")])
    assert [one.run for one in partings(both)] == ["b"] * 3 + ["a"] * 3
    assert [one.run for one in growths(both)] == ["b", "b", "a", "a"]
    assert [one.run for one in steps(both)] == ["b", "a"]


def test_the_worst_first_and_of_equal_ones_the_earlier():
    rows = table_of(*((f"m{n}.y", 0, "forward", sqnr) for n, sqnr in enumerate((5.0, -INF, 3.0, 5.0, INF, 3.0))))
    assert worst(rows, 4)["order"].tolist() == [1, 2, 5, 0]
    assert worst(rows, 100)["order"].tolist() == [1, 2, 5, 0, 3]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0], 1.5),
        ([1.0, INF], 1.0),
        ([-INF, INF], -INF),
        ([INF, INF], INF),
        ([-INF, 4.0, INF], 4.0),
    ],
)
def test_medians_of_what_is_infinite(values, expected):
    assert median(values) == expected
    assert median(values[::-1]) == expected
