"""Lists that stay on disk behave as lists that were read."""

import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.quantscope.analysis import stored_lists
from megatron.quantscope.analysis.aggregate import channels_by_layer, exponents_of, merged
from megatron.quantscope.analysis.errors import AnalysisError
from megatron.quantscope.analysis.stored_lists import has_items, read_summary
from megatron.quantscope.analysis.tables import read_table

ROWS = 23


@pytest.fixture
def path(tmp_path):
    generator = np.random.default_rng(0)
    lists = [generator.random(length).tolist() for length in generator.integers(0, 6, ROWS)]
    table = pa.table(
        {
            "site": [f"fc{row % 3}.x" for row in range(ROWS)],
            "channel_amax": pa.array(lists, pa.list_(pa.float32())),
            "top": pa.array([[float(row)] * 2 for row in range(ROWS)], pa.list_(pa.float64())),
            "amax": [float(row) for row in range(ROWS)],
        }
    )
    pq.write_table(table, tmp_path / "summary.parquet", row_group_size=5)
    return tmp_path / "summary.parquet"


def same(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "chosen",
    [
        lambda frame: frame,
        lambda frame: frame[frame["site"] == "fc1.x"],
        lambda frame: frame.sort_values("amax", ascending=False),
        lambda frame: frame.iloc[::-4],
        lambda frame: frame.query("amax > 30"),
        lambda frame: frame.assign(more=1).reset_index(drop=True).tail(9),
        lambda frame: pd.concat([frame.head(3), frame.tail(2)]),
        lambda frame: frame.drop_duplicates("site").copy(),
        lambda frame: next(iter(dict(list(frame.groupby("site"))).values())),
        lambda frame: pickle.loads(pickle.dumps(frame)),
    ],
)
def test_rows_are_chosen_as_of_a_frame_in_memory(path, chosen):
    stored, read = chosen(read_summary(path)), chosen(read_table(path))
    assert list(stored.columns) == list(read.columns)
    for column in ("channel_amax", "top"):
        assert same(stored[column], read[column])
    assert stored["amax"].tolist() == read["amax"].tolist()


def test_single_rows_missing_rows_and_records(path):
    stored, read = read_summary(path), read_table(path)
    assert np.array_equal(stored["channel_amax"].iloc[7], read["channel_amax"].iloc[7])
    assert np.array_equal(stored.iloc[-1]["top"], [22.0, 22.0])
    missing = stored.reindex([3, 99])
    assert missing["top"].isna().tolist() == [False, True]
    assert missing["top"].iloc[1] is None
    for one, other in zip(stored.to_dict("records"), read.to_dict("records"), strict=True):
        assert one["site"] == other["site"]
        assert np.array_equal(one["top"], other["top"])
    assert stored["top"].to_numpy().shape == (ROWS,)  # not a matrix, though all are of one length


def test_which_lists_have_items(path):
    stored, read = read_summary(path), read_table(path)
    expected = [len(one) > 0 for one in read["channel_amax"]]
    assert has_items(stored["channel_amax"]).tolist() == has_items(read["channel_amax"]).tolist() == expected
    assert not all(expected)
    assert has_items(stored.reindex([3, 99])["top"]).tolist() == [True, False]
    assert len(stored[:0][has_items(stored[:0]["top"])]) == 0


def test_only_the_row_groups_that_are_looked_at_are_read(path, monkeypatch):
    groups = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, number, **more: groups.append(number) or read(self, number, **more),
    )
    stored_lists._groups.clear()
    frame = read_summary(path)
    assert groups == []
    list(frame[frame["amax"].between(5, 11)]["channel_amax"])
    assert groups == [1, 2]


def test_a_file_that_was_replaced_is_noticed(path):
    frame = read_summary(path)
    pq.write_table(pq.read_table(path), path)
    with pytest.raises(AnalysisError, match="replaced"):
        frame["top"].iloc[0]


def test_aggregates_are_those_of_a_frame_in_memory(tables, tmp_path):
    _, summary, _ = tables
    path = tmp_path / "summary.parquet"
    summary.to_parquet(path, row_group_size=11)
    stored = read_summary(path)
    of_site = stored[stored["site"] == "fc2.x"], summary[summary["site"] == "fc2.x"]
    one, other = (exponents_of(frame) for frame in of_site)
    assert (one.first, one.counts.tolist()) == (other.first, other.counts.tolist())
    assert np.array_equal(channels_by_layer(of_site[0], 16)[2], channels_by_layer(of_site[1], 16)[2])
    pd.testing.assert_frame_equal(merged(stored, "site"), merged(summary, "site"))


def test_only_so_many_bytes_are_held(path, monkeypatch):
    monkeypatch.setattr(stored_lists, "_BYTES_HELD", 200)
    stored_lists._groups.clear()
    stored, read = read_summary(path), read_table(path)
    for _ in range(2):
        assert same(stored["top"], read["top"])
    assert 0 < stored_lists._groups._bytes <= 200
