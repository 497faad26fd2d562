"""Segments: valid safetensors files to the library of that name, no byte twice, and sizes that are known beforehand."""

import errno
import hashlib
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron.quantscope.capture import CaptureError
from megatron.quantscope.capture import segment_writer as segment_writer_module
from megatron.quantscope.capture.budget import Budget
from megatron.quantscope.capture.segments import Segments
from tests.quantscope.capture.conftest import (
    ODD_TENSORS,
    append_to,
    bits,
    header_of,
)

ALIGNMENT = 64


def contents_of(path):
    """Name -> tensor, by the library; fillers left out."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if not name.startswith("padding_")}  # noqa: SIM118


class TestFile:
    def test_the_library_reads_it_bit_by_bit(self, open_segments, tmp_path):
        segments, shown = open_segments(), {}
        for name, make in ODD_TENSORS.items():
            shown[name] = make().detach().resolve_conj().resolve_neg().contiguous()
            append_to(segments, 0, name, shown[name])
        (closed,) = segments.finish(0)
        path = tmp_path / closed.file
        assert path.name == "iter000_rank3_000.safetensors"
        assert path.stat().st_size == closed.bytes
        contents = contents_of(path)
        unique = {hashlib.sha256(bits(tensor).numpy()).digest() for tensor in shown.values()}
        assert len(contents) == len(unique) < len(shown)  # bytes that are there already are not written again
        for name, tensor in contents.items():
            assert torch.equal(bits(tensor), bits(shown[name]))
            if tensor.dtype != torch.uint8:  # what the format has no word for is kept as bytes
                assert (tensor.dtype, tensor.shape) == (shown[name].dtype, shown[name].shape)
        assert {str(tensor.dtype) for tensor in contents.values()} > {"torch.bfloat16", "torch.float8_e4m3fn"}

    def test_its_header(self, open_segments, tmp_path):
        segments = open_segments()
        for number in range(5):
            append_to(segments, 12, f"t{number}", torch.full((number + 1,), float(number)))
        (closed,) = segments.finish(12)
        data, header = header_of(tmp_path / closed.file)
        labels = header.pop("__metadata__")
        assert labels == {"run_id": "run", "quant_type": "bf16", "rank": "3", "iteration": "12"}
        end = 0
        for name, entry in header.items():  # in the file's order, without a gap
            begin, last = entry["data_offsets"]
            assert begin == end
            assert name.startswith("padding_") or (data + begin) % ALIGNMENT == 0
            end = last
        assert data + end == closed.bytes
        assert closed.bytes % ALIGNMENT == 0
        with safe_open(tmp_path / closed.file, framework="pt") as file:
            assert file.metadata() == labels

    def test_nothing_has_its_name_before_it_is_complete(self, open_segments, tmp_path):
        segments = open_segments()
        append_to(segments, 0, "t", torch.ones(3))
        assert all(path.name.startswith(".writing-") for path in tmp_path.iterdir())
        segments.finish(0)
        assert [path.name for path in tmp_path.iterdir()] == ["iter000_rank3_000.safetensors"]

    def test_discarded_ones_leave_nothing(self, open_segments, tmp_path):
        segments = open_segments()
        for iteration in range(3):
            append_to(segments, iteration, "t", torch.ones(iteration))
        segments.discard()
        assert list(tmp_path.iterdir()) == []

    def test_a_name_that_exists_is_not_written_over(self, open_segments, tmp_path):
        (tmp_path / "iter000_rank3_000.safetensors").write_text("mine")
        segments = open_segments()
        append_to(segments, 0, "t", torch.ones(3))
        with pytest.raises(CaptureError, match="File exists"):
            segments.finish(0)
        assert (tmp_path / "iter000_rank3_000.safetensors").read_text() == "mine"
        assert len(list(tmp_path.iterdir())) == 1

    def test_more_tensors_than_the_header_has_room_for_go_to_further_files(self, open_segments, tmp_path):
        segments = open_segments(expected=1)
        shown = {f"a_rather_long_name_of_tensor_{number}": torch.tensor([number]) for number in range(200)}
        places = {name: append_to(segments, 0, name, tensor) for name, tensor in shown.items()}
        closed = segments.finish(0)
        assert [each.file for each in closed] == [
            f"iter000_rank3_{part:03d}.safetensors" for part in range(len(closed))
        ]
        assert len(closed) > 3
        found = {name: (each.file, t) for each in closed for name, t in contents_of(tmp_path / each.file).items()}
        assert found.keys() == shown.keys()
        for name, (file, tensor) in found.items():
            assert file == places[name].file
            assert torch.equal(tensor, shown[name])

    @settings(deadline=None, max_examples=20)
    @given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.randoms(use_true_random=False), st.booleans())
    def test_size_does_not_depend_on_the_order(self, tmp_path_factory, sizes, random, dry):
        found = set()
        for _ in range(2):
            folder = tmp_path_factory.mktemp("segments")
            segments = Segments(
                folder, rank=0, labels={}, budget=Budget(1 << 40), tensors_expected=lambda: len(sizes), dry=dry
            )
            order = list(enumerate(sizes))
            random.shuffle(order)
            for number, size in order:
                append_to(segments, 0, f"t{number}", torch.full((size,), number, dtype=torch.uint8))
            (closed,) = segments.finish(0)
            found.add(closed.bytes)
            assert dry == (list(folder.iterdir()) == [])
        assert len(found) == 1

    def test_threads(self, open_segments, tmp_path):
        segments = open_segments(expected=400)
        shown = {f"t{number}": torch.full((number,), float(number)) for number in range(1, 400)}

        def work(part):
            for name, tensor in list(shown.items())[part::4]:
                append_to(segments, 0, name, tensor)

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (closed,) = segments.finish(0)
        contents = contents_of(tmp_path / closed.file)
        assert contents.keys() == shown.keys()
        assert all(torch.equal(contents[name], tensor) for name, tensor in shown.items())


class TestFailures:
    def test_a_place_that_could_not_be_written_becomes_a_filler(self, open_segments, tmp_path, monkeypatch):
        segments, write = open_segments(), os.pwrite
        first = append_to(segments, 0, "first", torch.ones(100))

        def full(file, content, offset):
            write(file, content[:10], offset)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(segment_writer_module.os, "pwrite", full)
        with pytest.raises(CaptureError, match="full"):
            append_to(segments, 0, "second", torch.full((50,), 2.0))
        monkeypatch.setattr(segment_writer_module.os, "pwrite", write)
        third = append_to(segments, 0, "third", torch.full((50,), 3.0))
        again = append_to(segments, 0, "again", torch.full((50,), 2.0))
        assert not again.reference
        assert not any(map(segments.is_lost, (first, third, again)))
        (closed,) = segments.finish(0)
        contents = contents_of(tmp_path / closed.file)
        assert contents.keys() == {"first", "third", "again"}
        assert torch.equal(contents["third"], torch.full((50,), 3.0))
        assert torch.equal(contents["again"], torch.full((50,), 2.0))

    def test_a_reference_to_what_is_being_written_is_lost_with_it(self, open_segments, monkeypatch):
        segments, write, references = open_segments(), os.pwrite, []

        def full(file, content, offset):
            if offset:
                references.append(append_to(segments, 0, "same", torch.ones(9)))  # the other writer, meanwhile
                raise OSError(errno.ENOSPC, "full")
            return write(file, content, offset)

        monkeypatch.setattr(segment_writer_module.os, "pwrite", full)
        with pytest.raises(CaptureError):
            append_to(segments, 0, "t", torch.ones(9))
        monkeypatch.setattr(segment_writer_module.os, "pwrite", write)
        assert references[0].reference
        append_to(segments, 0, "again", torch.ones(9))  # which does not heal the reference
        assert segments.is_lost(references[0])

    def test_parts_after_the_one_that_failed_are_gone_too(self, open_segments, tmp_path, monkeypatch):
        segments = open_segments(expected=1)
        places = [append_to(segments, 0, f"a_rather_long_name_{n}", torch.tensor([n])) for n in range(200)]
        name, calls = segment_writer_module.give_name, []

        def fail_second(temporary, path):
            calls.append(path)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "full")
            name(temporary, path)

        monkeypatch.setattr(segment_writer_module, "give_name", fail_second)
        with pytest.raises(CaptureError, match="full"):
            segments.finish(0)
        assert [path.name for path in tmp_path.iterdir()] == ["iter000_rank3_000.safetensors"]
        assert {place.file for place in places if not segments.is_lost(place)} == {"iter000_rank3_000.safetensors"}

    def test_a_spent_budget_takes_the_place_back(self, open_segments, tmp_path):
        segments = open_segments(expected=1, budget=10_000)
        append_to(segments, 0, "small", torch.ones(10))
        with pytest.raises(CaptureError, match="budget"):
            append_to(segments, 0, "large", torch.ones(100_000))
        append_to(segments, 0, "other", torch.zeros(10))
        (closed,) = segments.finish(0)
        assert closed.bytes == (tmp_path / closed.file).stat().st_size <= 10_000
        assert contents_of(tmp_path / closed.file).keys() == {"small", "other"}

    def test_a_budget_spent_at_the_first_tensor_leaves_no_file(self, open_segments, tmp_path):
        segments = open_segments(budget=10_000)
        with pytest.raises(CaptureError, match="budget"):
            append_to(segments, 0, "large", torch.ones(100_000))
        assert segments.finish(0) == []
        assert list(tmp_path.iterdir()) == []
