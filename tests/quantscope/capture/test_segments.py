"""Segments: valid safetensors files to the library of that name, no byte twice, and sizes that are known beforehand."""

import errno
import hashlib
import json
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron.quantscope.capture import CaptureError, open_capture
from megatron.quantscope.capture import segment_writer as segment_writer_module
from megatron.quantscope.capture import sink as sink_module
from megatron.quantscope.capture.budget import Budget
from megatron.quantscope.capture.hashing import checksum
from megatron.quantscope.capture.manifest import ManifestWriter
from megatron.quantscope.capture.segments import Segments
from tests.quantscope.capture.conftest import (
    LINEAR,
    MODES,
    ODD_TENSORS,
    ROWS_A_PASS,
    bits,
    check_readable,
    linear_tensors,
    manifest_of,
    read,
    run_folder,
    run_iteration,
    stored_tensor,
)

ALIGNMENT = 64


@pytest.fixture
def open_segments(tmp_path):
    def open_(expected=100, budget=1 << 40, **options):
        labels = {"run_id": "run", "quant_type": "bf16", "rank": "3"}
        budget = Budget(budget)
        return Segments(tmp_path, rank=3, labels=labels, budget=budget, tensors_expected=lambda: expected, **options)

    return open_


def header_of(path):
    """The header of a safetensors file, as the format's specification lays it out."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


def contents_of(path):
    """Name -> tensor, by the library; fillers left out."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if not name.startswith("padding_")}  # noqa: SIM118


def append(segments, iteration, name, tensor):
    return segments.append(iteration, name, tensor, checksum(tensor))


class TestFile:
    def test_the_library_reads_it_bit_by_bit(self, open_segments, tmp_path):
        segments, shown = open_segments(), {}
        for name, make in ODD_TENSORS.items():
            shown[name] = make().detach().resolve_conj().resolve_neg().contiguous()
            append(segments, 0, name, shown[name])
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
            append(segments, 12, f"t{number}", torch.full((number + 1,), float(number)))
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
        append(segments, 0, "t", torch.ones(3))
        assert all(path.name.startswith(".writing-") for path in tmp_path.iterdir())
        segments.finish(0)
        assert [path.name for path in tmp_path.iterdir()] == ["iter000_rank3_000.safetensors"]

    def test_discarded_ones_leave_nothing(self, open_segments, tmp_path):
        segments = open_segments()
        for iteration in range(3):
            append(segments, iteration, "t", torch.ones(iteration))
        segments.discard()
        assert list(tmp_path.iterdir()) == []

    def test_a_name_that_exists_is_not_written_over(self, open_segments, tmp_path):
        (tmp_path / "iter000_rank3_000.safetensors").write_text("mine")
        segments = open_segments()
        append(segments, 0, "t", torch.ones(3))
        with pytest.raises(CaptureError, match="File exists"):
            segments.finish(0)
        assert (tmp_path / "iter000_rank3_000.safetensors").read_text() == "mine"
        assert len(list(tmp_path.iterdir())) == 1

    def test_more_tensors_than_the_header_has_room_for_go_to_further_files(self, open_segments, tmp_path):
        segments = open_segments(expected=1)
        shown = {f"a_rather_long_name_of_tensor_{number}": torch.tensor([number]) for number in range(200)}
        places = {name: append(segments, 0, name, tensor) for name, tensor in shown.items()}
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
                append(segments, 0, f"t{number}", torch.full((size,), number, dtype=torch.uint8))
            (closed,) = segments.finish(0)
            found.add(closed.bytes)
            assert dry == (list(folder.iterdir()) == [])
        assert len(found) == 1

    def test_threads(self, open_segments, tmp_path):
        segments = open_segments(expected=400)
        shown = {f"t{number}": torch.full((number,), float(number)) for number in range(1, 400)}

        def work(part):
            for name, tensor in list(shown.items())[part::4]:
                append(segments, 0, name, tensor)

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
        first = append(segments, 0, "first", torch.ones(100))

        def full(file, content, offset):
            write(file, content[:10], offset)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(segment_writer_module.os, "pwrite", full)
        with pytest.raises(CaptureError, match="full"):
            append(segments, 0, "second", torch.full((50,), 2.0))
        monkeypatch.setattr(segment_writer_module.os, "pwrite", write)
        third = append(segments, 0, "third", torch.full((50,), 3.0))
        again = append(segments, 0, "again", torch.full((50,), 2.0))
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
                references.append(append(segments, 0, "same", torch.ones(9)))  # the other writer, meanwhile
                raise OSError(errno.ENOSPC, "full")
            return write(file, content, offset)

        monkeypatch.setattr(segment_writer_module.os, "pwrite", full)
        with pytest.raises(CaptureError):
            append(segments, 0, "t", torch.ones(9))
        monkeypatch.setattr(segment_writer_module.os, "pwrite", write)
        assert references[0].reference
        append(segments, 0, "again", torch.ones(9))  # which does not heal the reference
        assert segments.is_lost(references[0])

    def test_parts_after_the_one_that_failed_are_gone_too(self, open_segments, tmp_path, monkeypatch):
        segments = open_segments(expected=1)
        places = [append(segments, 0, f"a_rather_long_name_{n}", torch.tensor([n])) for n in range(200)]
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
        append(segments, 0, "small", torch.ones(10))
        with pytest.raises(CaptureError, match="budget"):
            append(segments, 0, "large", torch.ones(100_000))
        append(segments, 0, "other", torch.zeros(10))
        (closed,) = segments.finish(0)
        assert closed.bytes == (tmp_path / closed.file).stat().st_size <= 10_000
        assert contents_of(tmp_path / closed.file).keys() == {"small", "other"}

    def test_a_budget_spent_at_the_first_tensor_leaves_no_file(self, open_segments, tmp_path):
        segments = open_segments(budget=10_000)
        with pytest.raises(CaptureError, match="budget"):
            append(segments, 0, "large", torch.ones(100_000))
        assert segments.finish(0) == []
        assert list(tmp_path.iterdir()) == []


class TestNoByteTwice:
    def unique_bytes(self, session, capture):
        """What the rows' contents come to, each different one counted once."""
        rows = manifest_of(session, "tensor")
        contents = {bytes(bits(stored_tensor(session, row)).numpy()) for row in rows}
        assert len(capture.records) == len(rows)
        return sum(map(len, contents)), len(contents)

    def bytes_on_disk(self, session):
        found = []
        for path in run_folder(session).glob("*.safetensors"):
            _, header = header_of(path)
            header.pop("__metadata__")
            found += [e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n[:8] != "padding_"]
        return sum(found), len(found)

    def test_over_rows_modules_micro_batches_and_iterations(self, open_session):
        session = open_session(save_format="segment", control_iter=3, collect_micro_batches=2)
        sites = [session.site(**(LINEAR | {"module": f"decoder.layers.{n}.fc", "layer_idx": n})) for n in range(3)]
        tensors = linear_tensors(0)
        for iteration in range(3):
            session.begin_iteration(iteration)
            for micro_batch in range(2):
                session.begin_micro_batch(micro_batch, [micro_batch])
                before = torch.full((3, 4), float(micro_batch))
                for site in sites:
                    tap, after = site.tap(), before + 1
                    tap("forward", "pre", "input", before)
                    tap("forward", "pre", "weight", tensors["weight"])
                    tap("forward", "post", "output", after)  # the next one's input
                    tap("backward", "pre", "weight", tensors["weight"])
                    before = after
            session.end_iteration({})
        capture = read(session)
        assert self.unique_bytes(session, capture) == self.bytes_on_disk(session)
        weights = [record for record in capture.records if record.tensor_name == "weight"]
        assert len({(record.path, record.offset) for record in weights}) == 1
        assert sum(not record.reference for record in weights) == 1
        for record in weights:
            assert torch.equal(capture.load(record), tensors["weight"])

    def test_over_dtypes_and_shapes(self, open_session):
        """Bytes are bytes; each row says how to look at them."""
        session, base = open_session(save_format="segment"), torch.arange(32.0)
        shown = [base, base.reshape(4, 8), base.view(torch.int32), base.view(torch.bfloat16), base.view(torch.uint8)]
        tensors = dict(zip(linear_tensors(), [*shown, torch.zeros(2)], strict=True))
        run_iteration(session, 0, tensors=tensors)
        capture = read(session)
        assert self.bytes_on_disk(session) == (128 + 8, 2)
        for record in capture.records:
            loaded, expected = capture.load(record), tensors[record.tensor_name]
            assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
            assert torch.equal(bits(loaded), bits(expected))

    def test_what_is_equal_to_the_eye_only_is_kept_apart(self, open_session):
        session = open_session(save_format="segment")
        tensors = linear_tensors() | {"input": torch.zeros(8), "output": torch.full((8,), -0.0)}
        run_iteration(session, 0, tensors=tensors)
        capture = read(session)
        signs = {record.tensor_name: capture.load(record).signbit().any() for record in capture.records}
        assert (bool(signs["input"]), bool(signs["output"])) == (False, True)

    def test_maps_of_block_exponents_too(self, open_session):
        session = open_session(save_format="segment", mode="both", control_iter=2)
        for iteration in range(2):
            run_iteration(session, iteration, tensors=linear_tensors(0))
        capture = read(session)
        places = [(row["blocks"]["file"], row["blocks"]["offset"]) for row in manifest_of(session, "tensor")]
        assert len(set(places)) <= 6
        check_readable(capture, lambda iteration: linear_tensors(0))

    def test_a_row_never_refers_to_a_later_iteration(self, open_segments):
        """The two writers may take the last row of one iteration and the first of the next in any order."""
        segments = open_segments()
        later = append(segments, 1, "t", torch.ones(5))
        earlier = append(segments, 0, "t", torch.ones(5))
        assert (later.file, earlier.file) == ("iter001_rank3_000.safetensors", "iter000_rank3_000.safetensors")
        assert not earlier.reference
        assert append(segments, 1, "again", torch.ones(5)).file == earlier.file

    def test_what_was_measured_of_a_later_iteration_is_not_referred_to_either(self, open_session, monkeypatch):
        session = open_session(save_format="segment", mode="both", control_iter=0)
        submit, held = session._sink._writer.submit, []
        monkeypatch.setattr(session._sink._writer, "submit", held.append)
        for iteration in range(2):
            run_iteration(session, iteration, tensors=linear_tensors(0))
        monkeypatch.setattr(session._sink._writer, "submit", submit)
        rows, end = ROWS_A_PASS, 1
        for task in held[rows + end : 2 * rows + end] + held[:rows] + held[rows : rows + end]:
            task()  # the second iteration's rows first
        session._sink._writer.submit(held[-1])
        read(session)
        for row in manifest_of(session, "tensor"):
            if row["iteration"] == 0:
                assert row["file"].startswith("iter000")
                assert row["blocks"]["file"].startswith("iter000")


def test_more_rows_than_modules_promised(open_session, monkeypatch):
    monkeypatch.setattr(sink_module, "_ROWS_A_SITE", 0)
    session = open_session(save_format="segment", mode="both")
    sites = [session.site(**(LINEAR | {"module": f"fc{number}"})) for number in range(20)]
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    for number, site in enumerate(sites):
        site.tap()("forward", "pre", "input", torch.full((40,), float(number)))
    session.end_iteration({})
    capture = read(session)
    assert [line["kind"] for line in manifest_of(session)][:2] == ["segment", "segment"]
    for number, record in enumerate(capture.records):
        assert torch.equal(capture.load(record), torch.full((40,), float(number)))


class TestDryRun:
    def run(self, session, micro_batches=2):
        sites = [session.site(**(LINEAR | {"module": f"decoder.layers.{n}.fc", "layer_idx": n})) for n in range(3)]
        for iteration in range(2):
            session.begin_iteration(iteration)
            for micro_batch in range(micro_batches):
                session.begin_micro_batch(micro_batch, [10, 11])
                for number, site in enumerate(sites):
                    tap = site.tap()
                    for name, tensor in linear_tensors(iteration, tokens=7, inputs=40 + number).items():
                        tap("backward" if name.startswith("grad") else "forward", "pre", name, tensor)
            session.end_iteration({"lm loss": 2.5})
        session.close()
        assert session.failed is None
        return session.summary()

    @pytest.mark.parametrize("save_format", ["pt", "segment"])
    @pytest.mark.parametrize("mode", MODES)
    def test_counts_are_those_of_the_files(self, open_session, tmp_path, mode, save_format):
        options = {"control_iter": 2, "collect_micro_batches": 2, "mode": mode, "save_format": save_format}
        dry = self.run(open_session(dry_run=True, directory=tmp_path / "dry", **options))
        assert not (tmp_path / "dry").exists()
        session = open_session(directory=tmp_path / "real", run_id="20250101_000000_abcdef", **options)
        real = self.run(session)
        files = [path for path in (tmp_path / "real").rglob("*") if path.suffix in (".pt", ".safetensors")]
        assert (dry.files, dry.bytes) == (len(files), sum(path.stat().st_size for path in files))
        assert (dry.rows, dry.files, dry.bytes) == (real.rows, real.files, real.bytes)
        assert dry.rows == len(manifest_of(session, "tensor")) == 2 * 2 * 3 * 6
        assert (dry.iterations, real.iterations) == (2, 2)

    def test_of_a_budget_that_will_not_do(self, open_session, tmp_path, caplog):
        session = open_session(dry_run=True, directory=tmp_path / "dry", budget_bytes=20_000)
        run_iteration(session, 0)
        session.close()
        assert "budget" in session.failed
        assert not (tmp_path / "dry").exists()


class TestFsync:
    @pytest.fixture
    def events(self, monkeypatch):
        """What is forced to the disk, by inode, and when a commit is written."""
        events, append_line = [], ManifestWriter.append

        def force(descriptor):
            events.append(os.fstat(descriptor).st_ino)

        def noted(writer, kind, fields):
            append_line(writer, kind, fields)
            events.append(kind)

        monkeypatch.setattr(os, "fsync", force)
        monkeypatch.setattr(ManifestWriter, "append", noted)
        return events

    @pytest.mark.parametrize("save_format", ["pt", "segment"])
    @pytest.mark.parametrize("mode", MODES)
    def test_files_names_and_lines_are_on_disk_before_the_commit(self, open_session, events, mode, save_format):
        session = open_session(fsync=True, mode=mode, save_format=save_format)
        run_iteration(session, 0)
        session.close()
        before, after = events[: events.index("commit")], events[events.index("commit") :]
        folders = {session.config.directory / "mxfp8": "*.pt", run_folder(session): "*.safetensors"}
        for folder, pattern in folders.items():
            files = [path.stat().st_ino for path in folder.glob(pattern)]
            for inode in files:
                assert before.index(inode) < len(before) - 1 - before[::-1].index(folder.stat().st_ino)
        manifest = (run_folder(session) / "manifest_rank0.jsonl").stat().st_ino
        assert before[-1] == manifest
        assert manifest in after

    def test_not_unless_it_is_asked_for(self, open_session, events):
        for save_format in ("pt", "segment"):
            session = open_session(save_format=save_format, quant_type=save_format)
            run_iteration(session, 0)
            session.close()
        assert set(events) == {"commit", "closed"}


def test_two_runs_have_segments_of_their_own(open_session):
    """Also when the second one's content is on disk already, in the first one's folder."""
    for run_id in ("20250101_000000_aaaaaa", "20250102_000000_bbbbbb"):
        session = open_session(save_format="segment", run_id=run_id)
        run_iteration(session, 0)
        read(session)
    for run_id in ("20250101_000000_aaaaaa", "20250102_000000_bbbbbb"):
        capture = open_capture(session.config.directory, run=run_id)
        assert {record.path.parent.name for record in capture.records} == {run_id}
        check_readable(capture)
