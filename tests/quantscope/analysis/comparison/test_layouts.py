"""TP 1 against TP 2: parts are put together where the layouts differ, and compared as they lie where they do not."""

import math

import pytest
import torch

from megatron.quantscope.analysis.comparison import pair_runs, runs_of
from megatron.quantscope.capture import open_capture
from tests.quantscope.capture.handwritten import Writer, parallel

generator = torch.Generator().manual_seed(0)
X = torch.randn(8, 1, 12, generator=generator).bfloat16()
Y = torch.randn(8, 1, 6, generator=generator).bfloat16()
W = torch.randn(6, 12, generator=generator).bfloat16()
DX = torch.randn(8, 1, 12, generator=generator)
DW = torch.randn(6, 12, generator=generator)


def by_one(root, *, noise=0.0, scale=1.0, rank=0, **coordinates):
    """The whole layer, of one rank; `noise` on its output."""
    writer = Writer(root, quant_type="bf16", rank=rank, coordinates=parallel(**coordinates))
    writer.add(X, tensor_name="input")
    writer.add(W, tensor_name="weight")
    writer.add(Y + noise, tensor_name="output", phase="post")
    for name, tensor in (("grad_input", DX), ("grad_weight", DW)):
        writer.add(tensor * scale, tensor_name=name, operation="backward", phase="post", grad_scale=scale)
    writer.commit().close()
    return root


def by_two(root, *, noise=0.0, scale=1.0, ranks=(0, 1), size=2):
    """The column-parallel layer of tensor parallel ranks: x is gathered and kept once, dx is a summand of each."""
    for tp in ranks:
        writer = Writer(
            root, quant_type="bf16", rank=tp, coordinates=parallel(tp_rank=tp, tp_size=size), world_size=size
        )
        rows = slice(3 * tp, 3 * tp + 3)
        over = {"over": "tp"}
        if tp == 0:
            writer.add(X, tensor_name="input")
        writer.add(W[rows], tensor_name="weight", shard=[over | {"dim": 0}])
        writer.add(Y[..., rows] + noise, tensor_name="output", phase="post", shard=[over | {"dim": -1}])
        backward = {"operation": "backward", "phase": "post", "grad_scale": scale}
        share = DX * (0.25 if tp else 0.75) * scale
        writer.add(share, tensor_name="grad_input", shard=[over | {"reduce": "sum"}], stage="partial", **backward)
        writer.add(DW[rows] * scale, tensor_name="grad_weight", shard=[over | {"dim": 0}], **backward)
        writer.commit().close()
    return root


def by_name(table):
    return {row["tensor_name"]: row for row in table.to_dict("records")}


def test_one_rank_against_two(tmp_path, compared):
    table, log = compared(by_one(tmp_path / "one"), by_two(tmp_path / "two", scale=4.0))
    assert log.problems == log.notes == []
    assert table["tensor_name"].tolist() == ["input", "weight", "output", "grad_input", "grad_weight"]
    assert table["rank"].isna().all()
    assert (set(table["run"]), set(table["baseline"])) == ({"two/bf16"}, {"one/bf16"})
    rows = by_name(table)
    assert all(rows[name]["equal"] for name in ("input", "weight", "output", "grad_weight"))
    assert rows["grad_input"]["sqnr_db"] > 130  # 0.75 and 0.25 of a float32 add up but for a rounding
    whole = {"input": X, "weight": W, "output": Y, "grad_input": DX, "grad_weight": DW}
    assert {name: row["count"] for name, row in rows.items()} == {name: x.numel() for name, x in whole.items()}


def test_two_ranks_against_one(tmp_path, compared):
    table, log = compared(by_two(tmp_path / "two"), by_one(tmp_path / "one", noise=0.5, scale=2.0))
    assert log.problems == log.notes == []
    rows = by_name(table)
    expected = ((Y + 0.5).double() - Y.double()).square().sum() / Y.double().square().sum()
    assert rows["output"]["sqnr_db"] == pytest.approx(-10 * math.log10(expected))
    assert rows["grad_input"]["sqnr_db"] > 130
    assert rows["grad_weight"]["sqnr_db"] == math.inf


def test_the_same_layout_part_by_part(tmp_path, compared):
    table, log = compared(by_two(tmp_path / "a"), by_two(tmp_path / "b", noise=0.5, scale=3.0))
    assert log.problems == log.notes == []
    assert sorted(zip(table["tensor_name"], table["rank"], strict=True)) == [
        ("grad_input", 0), ("grad_input", 1), ("grad_weight", 0), ("grad_weight", 1), ("input", 0),
        ("output", 0), ("output", 1), ("weight", 0), ("weight", 1),
    ]  # fmt: skip
    gradients = table[table["tensor_name"].str.startswith("grad")]
    assert not gradients["equal"].any()
    assert (gradients["sqnr_db"] > 130).all()  # but for the rounding of 3 x
    for rank, row in enumerate(table[table["tensor_name"] == "output"].to_dict("records")):
        part = Y[..., 3 * rank : 3 * rank + 3]
        expected = ((part + 0.5).double() - part.double()).square().sum() / part.double().square().sum()
        assert row["sqnr_db"] == pytest.approx(-10 * math.log10(expected))
        assert row["count"] == part.numel()


def test_parts_of_the_same_layout_are_not_put_together(tmp_path):
    pairing = pair_runs(runs_of([open_capture(by_two(tmp_path / "a")), open_capture(by_two(tmp_path / "b"))]))
    assert not any(pair.tensor.assembled or pair.reference.assembled for pair in pairing.pairs)
    assert all(pair.equal_by_checksum for pair in pairing.pairs)


def test_a_rank_that_only_one_run_kept(tmp_path, compared):
    table, log = compared(by_two(tmp_path / "a"), by_two(tmp_path / "b", ranks=(1,)))
    assert log.problems == []
    assert log.notes == ["a/bf16: 5 tensors have no partner in b/bf16"]
    assert set(table["rank"]) == {1}
    assert len(table) == 4


def test_a_part_that_is_missing_from_the_whole(tmp_path, compared):
    table, log = compared(by_one(tmp_path / "one"), by_two(tmp_path / "two", ranks=(0,)))
    assert table["tensor_name"].tolist() == ["input"]
    assert len(log.problems) == 4
    assert all("the part of tp_rank 1 of 2 is missing" in problem for problem in log.problems)


def test_copies_of_data_parallel_ranks_are_no_tensors_without_a_partner(tmp_path, compared):
    for rank in range(2):
        writer = Writer(
            tmp_path / "two", quant_type="bf16", rank=rank, coordinates=parallel(dp_rank=rank, dp_size=2), world_size=2
        )
        writer.add(X, tensor_name="input", sample_indices=[rank], sample_idx=rank)
        writer.add(W, tensor_name="weight", sample_indices=[rank], sample_idx=rank)
        writer.commit().close()
    writer = Writer(tmp_path / "one", quant_type="bf16")
    for micro_batch in range(2):
        where = {"micro_batch": micro_batch, "sample_indices": [micro_batch], "sample_idx": micro_batch}
        writer.add(X, tensor_name="input", **where)
        writer.add(W, tensor_name="weight", **where)
    writer.commit().close()
    table, log = compared(tmp_path / "one", tmp_path / "two")
    assert log.notes == log.problems == []
    assert table["tensor_name"].tolist() == ["input", "weight", "input"]
    assert table["micro_batch"].tolist() == [0, 0, 1]
    assert table["equal"].all()
