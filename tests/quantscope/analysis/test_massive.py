import numpy as np
import pandas

from megatron.quantscope.analysis.massive import massive_activations


def rows(*values, channel=3, **changed):
    """fc2.y of one layer a value: the largest of its tensor, with its sign; median 1."""
    frame = []
    for layer, value in enumerate(values):
        amax = np.full(8, 2.0, dtype="f4")
        amax[channel] = abs(value)
        frame.append(
            {"site": "fc2.y", "symbol": "y", "family": "activation", "layer_idx": layer, "amax": abs(value),
             "median_magnitude": 1.0, "min": min(value, -2.0), "max": max(value, 2.0), "channel_amax": amax}
        )  # fmt: skip
    return pandas.DataFrame(frame).assign(**changed)


def test_the_course_of_one_channel():
    (found,) = massive_activations(rows(3.0, 5000.0, -4.0, 600.0, -4900.0))
    assert (found.site, found.channel, found.channels) == ("fc2.y", 3, 8)
    assert [(peak.layer, peak.value) for peak in found.peaks] == [(1, 5000.0), (3, 600.0), (4, -4900.0)]
    assert [peak.layer for peak in found.opposed] == [4]
    assert found.largest.times_median == 5000


def test_another_channel_is_another_activation():
    table = pandas.concat([rows(5000.0, channel=3), rows(3.0, 6000.0, channel=5)], ignore_index=True)
    assert [(one.channel, one.layers) for one in massive_activations(table)] == [(5, [1]), (3, [0])]


def test_micro_batches_and_ranks_count_with_their_largest():
    table = pandas.concat([rows(2000.0), rows(3000.0), rows(2500.0)], ignore_index=True)
    (found,) = massive_activations(table)
    assert [peak.value for peak in found.peaks] == [3000.0]


def test_what_is_none():
    assert massive_activations(rows(99.0, median_magnitude=0.001)) == []
    assert massive_activations(rows(999.0)) == []
    assert massive_activations(rows(5000.0, family="gradient")) == []
    assert massive_activations(rows(1.0, symbol="p", median_magnitude=1e-9)) == []
    assert massive_activations(rows(5000.0, layer_idx=None)) == []
    bare = rows(5000.0)
    bare.at[0, "channel_amax"] = np.zeros(0, dtype="f4")  # of captured statistics
    assert massive_activations(bare) == []
