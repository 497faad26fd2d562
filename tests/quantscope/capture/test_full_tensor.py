"""Shards put together again: against a splitter of its own in NumPy, and from captures on disk."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.quantscope.capture import CaptureError, open_capture
from megatron.quantscope.capture.full_tensor import full_tensor, logical_key, logical_tensors
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord
from tests.quantscope.capture.conftest import linear_tensors, rows_of, run_iteration
from tests.quantscope.capture.handwritten import MODULE, Writer, parallel


def split_by(array, split, size):
    """The part of each rank along a split's axis: index arithmetic, and nothing of the code under test."""
    if "reduce" in split:
        shares = [array // size] * size
        shares[0] = array - (size - 1) * (array // size)
        return shares
    length, pieces = array.shape[split["dim"]], split.get("pieces", 1)
    at = np.arange(length).reshape(pieces, -1)  # a row a piece
    per_rank = at.shape[1] // size
    parts = []
    for rank in range(size):
        if split.get("order") == "zigzag":
            chunk = at.shape[1] // (2 * size)
            mirror = 2 * size - 1 - rank
            own = [
                np.concatenate([row[rank * chunk : (rank + 1) * chunk], row[mirror * chunk : (mirror + 1) * chunk]])
                for row in at
            ]
        else:
            own = [row[rank * per_rank : (rank + 1) * per_rank] for row in at]
        parts.append(np.take(array, np.concatenate(own), axis=split["dim"]))
    return parts


def capture_of(parts, shard, *, tensor_name="output", **fields):
    """A capture whose tensors are in memory: {(tp_rank, cp_rank): array} -> records."""
    sizes = {axis: 1 + max(place[number] for place in parts) for number, axis in enumerate(("tp", "cp"))}
    records, held = [], {}
    for rank, ((tp, cp), array) in enumerate(parts.items()):
        record = TensorRecord(
            rank=rank,
            layer_type="linear",
            operation="backward" if tensor_name.startswith("grad") else "forward",
            quant_type="bf16",
            tensor_name=tensor_name,
            module=MODULE,
            iteration=0,
            sample_indices=(3,),
            parallel=parallel(tp_rank=tp, tp_size=sizes["tp"], cp_rank=cp, cp_size=sizes["cp"]),
            shard=tuple(shard),
            path=None,
            bytes=0,
            **fields,
        )
        records.append(record)
        held[rank] = torch.as_tensor(array)

    class InMemory(Capture):
        def load(self, record):
            return held[record.rank]

    return InMemory(directory=".", records=records)


@st.composite
def layouts(draw):
    """(whole, {(tp, cp): part}, splits): any tensor, split over tp and then over cp, or one of them, or none."""
    tp, cp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rank_count = draw(st.integers(1, 3))
    lengths, shard = [draw(st.integers(1, 3)) for _ in range(rank_count)], []
    for axis, size in (("tp", tp), ("cp", cp)):
        kind = draw(st.sampled_from(("whole", "dim", "pieces", "zigzag", "sum")))
        if size == 1 or kind == "whole":
            continue
        if kind == "sum":
            shard.append({"over": axis, "reduce": "sum"})
            continue
        dim = draw(st.integers(-rank_count, rank_count - 1))
        split = {"over": axis, "dim": dim}
        split |= {"pieces": draw(st.integers(2, 3))} if kind == "pieces" else {}
        split |= {"order": "zigzag"} if kind == "zigzag" else {}
        lengths[dim] *= size * split.get("pieces", 1) * (2 if kind == "zigzag" else 1)
        shard.append(split)
    dtype = draw(st.sampled_from((np.float16, np.float32, np.float64, np.int32, np.uint8)))
    whole = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, lengths).astype(dtype)
    # The last split lies outermost: it is made first.
    parts = {(): whole}
    for split in reversed(shard):
        size = {"tp": tp, "cp": cp}[split["over"]]
        parts = {
            (rank, *rest): part
            for rest, array in parts.items()
            for rank, part in enumerate(split_by(array, split, size))
        }
    axes = [split["over"] for split in shard]
    placed = {}
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            of = {"tp": tp_rank, "cp": cp_rank}
            placed[tp_rank, cp_rank] = parts[tuple(of[axis] for axis in axes)]
    return whole, placed, shard


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_whatever_was_split_is_put_together_bit_by_bit(layout):
    whole, parts, shard = layout
    capture = capture_of(parts, shard)
    for record in capture.records:
        found = full_tensor(capture, record)
        assert found.numpy().dtype == whole.dtype
        assert found.shape == whole.shape
        assert found.numpy().tobytes() == np.ascontiguousarray(whole).tobytes()


def test_the_example_of_the_format():
    """Written out by hand, so that splitter and code can not be wrong together."""
    gate_and_up = [{"over": "tp", "dim": 0, "pieces": 2}]
    capture = capture_of({(0, 0): np.array([1, 2, 5, 6]), (1, 0): np.array([3, 4, 7, 8])}, gate_and_up)
    assert capture.full_tensor(capture.records[0]).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    zigzag = [{"over": "cp", "dim": 0, "order": "zigzag"}]
    capture = capture_of({(0, 0): np.array([0, 1, 6, 7]), (0, 1): np.array([2, 3, 4, 5])}, zigzag)
    assert capture.full_tensor(capture.records[1]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_two_splits_of_one_dimension_are_undone_in_their_order():
    """The sequence over tp within the part of a cp rank, as sequence parallelism has it."""
    parts = {(0, 0): np.array([0, 1]), (1, 0): np.array([6, 7]), (0, 1): np.array([2, 3]), (1, 1): np.array([4, 5])}
    shard = [{"over": "tp", "dim": 0}, {"over": "cp", "dim": 0, "order": "zigzag"}]
    capture = capture_of(parts, shard)
    assert capture.full_tensor(capture.records[2]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_of_copies_the_lowest_rank_s_is_taken():
    parts = {(tp, cp): np.array([10 * tp + cp]) for cp in range(3) for tp in range(2)}
    capture = capture_of(parts, [{"over": "tp", "dim": 0}])  # and over cp they are to be copies
    for record in capture.records:
        assert capture.full_tensor(record).tolist() == [0, 10]


def test_summands_are_added_in_float64_and_rounded_once():
    rng = np.random.default_rng(0)
    parts = {(rank, 0): torch.from_numpy(rng.standard_normal((5, 7))).bfloat16() for rank in range(4)}
    capture = capture_of(parts, [{"over": "tp", "reduce": "sum"}])
    found = capture.full_tensor(capture.records[0])
    expected = sum(part.double() for part in parts.values()).bfloat16()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    one_by_one = parts[0, 0] + parts[1, 0] + parts[2, 0] + parts[3, 0]
    assert not torch.equal(found, one_by_one)  # what adding in bfloat16 would have given


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.int64])
def test_dtypes_that_arithmetic_does_not_know_are_concatenated(dtype):
    parts = {(rank, 0): torch.tensor([rank, 1 - rank, 1]).to(dtype) for rank in range(2)}
    capture = capture_of(parts, [{"over": "tp", "dim": 0}])
    found = capture.full_tensor(capture.records[0])
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in parts.values()]))


class TestGradients:
    def scaled(self, tensor_name, scale, **kinds):
        return capture_of({(0, 0): np.array([3.0, 7.0], np.float32)}, [], tensor_name=tensor_name, grad_scale=scale)

    def test_their_scale_is_divided_off(self):
        capture = self.scaled("grad_output", 4.0)
        assert capture.full_tensor(capture.records[0]).tolist() == [0.75, 1.75]
        assert capture.full_tensor(capture.records[0], unscaled=False).tolist() == [3.0, 7.0]

    @pytest.mark.parametrize("tensor_name", ["weight", "output", "input"])
    def test_other_tensors_have_none(self, tensor_name):
        capture = self.scaled(tensor_name, 4.0)
        assert capture.full_tensor(capture.records[0]).tolist() == [3.0, 7.0]

    def test_a_sum_is_rounded_after_the_division(self):
        parts = {(0, rank): torch.tensor([1.0 + rank * 2.0**-8]).bfloat16() for rank in range(2)}
        capture = capture_of(parts, [{"over": "cp", "reduce": "sum"}], tensor_name="grad_weight", grad_scale=2.0)
        expected = (parts[0, 0].double() + parts[0, 1].double()) / 2
        assert torch.equal(capture.full_tensor(capture.records[0]), expected.bfloat16())


class TestErrors:
    def test_missing_ranks_are_named(self):
        capture = capture_of({(0, 0): np.ones(2), (3, 0): np.ones(2)}, [{"over": "tp", "dim": 0}])
        message = rf"output of {MODULE} .*: the part of tp_rank 1 of 4; tp_rank 2 of 4 is missing"
        with pytest.raises(CaptureError, match=message):
            capture.full_tensor(capture.records[0])

    def test_ranks_that_disagree(self):
        capture = capture_of({(0, 0): np.ones(2), (1, 0): np.ones(2)}, [{"over": "tp", "dim": 0}])
        object.__setattr__(capture.records[1], "shard", ({"over": "tp", "dim": 1},))
        with pytest.raises(CaptureError, match="ranks 0 and 1 say that it is split differently"):
            capture.full_tensor(capture.records[0])

    @pytest.mark.parametrize(
        ("shapes", "split"),
        [
            (((2, 3), (2, 4)), {"dim": 0}),
            (((3,), (3,)), {"dim": 0, "order": "zigzag"}),
            (((3,), (3,)), {"dim": 0, "pieces": 2}),
            (((3,), (4,)), {"reduce": "sum"}),
            (((3,), (3,)), {"dim": 2}),
            (((4,), (4,)), {"dim": 0, "order": "spiral"}),
        ],
    )
    def test_parts_that_do_not_fit(self, shapes, split):
        parts = {(rank, 0): np.ones(shape) for rank, shape in enumerate(shapes)}
        capture = capture_of(parts, [{"over": "tp", **split}])
        with pytest.raises(CaptureError, match="the parts do not fit together: ") as raised:
            capture.full_tensor(capture.records[0])
        assert "\n" not in str(raised.value)

    def test_a_split_without_coordinates(self):
        capture = capture_of({(0, 0): np.ones(2)}, [{"over": "tp", "dim": 0}])
        capture.records[0].parallel.clear()
        with pytest.raises(CaptureError, match="it is split, and 'tp_rank' is not known"):
            capture.full_tensor(capture.records[0])

    def test_a_record_of_another_capture(self):
        one = capture_of({(0, 0): np.ones(2)}, [])
        other = capture_of({(0, 0): np.ones(2)}, [], tensor_name="input", counter=5)
        with pytest.raises(CaptureError, match="not a record of this capture"):
            one.full_tensor(other.records[0])


class TestFromDisk:
    """One logical linear layer, kept by one rank and by four (TP 2, CP 2)."""

    whole = torch.randn(8, 1, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(2)).half()

    def by_one(self, root):
        writer = Writer(root)
        writer.add(self.whole, tensor_name="output", phase="post", sample_indices=[4, 5])
        writer.add(self.weight, tensor_name="weight", sample_indices=[4, 5])
        writer.add(self.gradient, tensor_name="grad_weight", operation="backward", phase="post", sample_indices=[4, 5])
        writer.commit().close()
        return open_capture(root)

    def by_four(self, root):
        tokens = ([0, 1, 6, 7], [2, 3, 4, 5])  # zigzag of 8 tokens over 2 ranks
        for cp in range(2):
            for tp in range(2):
                coordinates = parallel(tp_rank=tp, tp_size=2, cp_rank=cp, cp_size=2)
                writer = Writer(root, rank=2 * cp + tp, coordinates=coordinates, world_size=4)
                here = {"sample_indices": [4, 5], "micro_batch": 3}
                writer.add(
                    self.whole[tokens[cp]][..., 3 * tp : 3 * tp + 3],
                    tensor_name="output",
                    phase="post",
                    shard=[{"over": "tp", "dim": -1}, {"over": "cp", "dim": 0, "order": "zigzag"}],
                    **here,
                )
                writer.add(
                    self.weight[3 * tp : 3 * tp + 3], tensor_name="weight", shard=[{"over": "tp", "dim": 0}], **here
                )
                summand = self.gradient * (0.25 if cp else 0.75)
                writer.add(
                    2 * summand[2 * tp : 2 * tp + 2],
                    tensor_name="grad_weight",
                    operation="backward",
                    phase="post",
                    grad_scale=2.0,
                    stage="partial",
                    shard=[{"over": "tp", "dim": 0}, {"over": "cp", "reduce": "sum"}],
                    **here,
                )
                writer.commit().close()
        return open_capture(root)

    def test_two_layouts_side_by_side(self, tmp_path):
        one, four = self.by_one(tmp_path / "one"), self.by_four(tmp_path / "four")
        assert len(four.records) == 12
        others = {logical_key(record): record for record in logical_tensors(four)}
        assert len(others) == 3
        for record in logical_tensors(one):
            assert torch.equal(one.full_tensor(record), one.load(record))
            found = four.full_tensor(others[logical_key(record)])
            if record.tensor_name == "grad_weight":
                torch.testing.assert_close(found, self.gradient, rtol=1e-6, atol=0)
            else:
                assert torch.equal(found, one.load(record))

    def test_by_a_row_of_the_table(self, tmp_path):
        four = self.by_four(tmp_path)
        frame = four.frame()
        row = frame[(frame["tensor_name"] == "weight") & (frame["rank"] == 3)].iloc[0]
        assert torch.equal(four.full_tensor(row), self.weight)

    def test_copies_are_taken_from_the_lowest_rank(self, tmp_path):
        four = self.by_four(tmp_path)
        assert {record.rank for record in logical_tensors(four)} == {0}
        weights = four.logical.of(rows_of(four, tensor_name="weight", rank=3)[0])
        assert [record.rank for record in weights] == [0, 1, 2, 3]

    def test_a_rank_that_is_not_there(self, tmp_path):
        self.by_four(tmp_path)
        for path in tmp_path.glob("*/runs/*/manifest_rank[13].jsonl"):
            path.unlink()
        four = open_capture(tmp_path)
        with pytest.raises(CaptureError, match="the part of tp_rank 1 of 2 is missing"):
            four.full_tensor(rows_of(four, tensor_name="weight")[0])

    def test_a_module_that_is_called_twice(self, tmp_path):
        for rank in range(2):
            writer = Writer(tmp_path, rank=rank, coordinates=parallel(tp_rank=rank, tp_size=2), world_size=2)
            for call in range(2):
                writer.add(torch.full((2,), 10.0 * call + rank), shard=[{"over": "tp", "dim": 0}])
            writer.commit().close()
        capture = open_capture(tmp_path)
        found = [capture.full_tensor(record).tolist() for record in logical_tensors(capture)]
        assert found == [[0, 0, 1, 1], [10, 10, 11, 11]]


def test_a_pt_capture_too(open_session):
    session = open_session(control_iter=2)
    for iteration in range(2):
        run_iteration(session, iteration)
    session.close()
    capture = open_capture(session.config.directory)
    logical = list(logical_tensors(capture))
    assert len(logical) == len(capture.records) == len(set(map(logical_key, logical)))
    for record in logical:
        assert torch.equal(capture.full_tensor(record), linear_tensors(record.iteration)[record.tensor_name])
