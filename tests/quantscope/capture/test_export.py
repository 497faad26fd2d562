"""Segments written out as `pt` files: what a session would have written in that format."""

import errno
import json
import os
import shutil

import pytest
import torch

from megatron.quantscope.capture import CaptureError, open_capture
from megatron.quantscope.capture.export import export
from megatron.quantscope.capture.folder import CaptureFolder
from megatron.quantscope.capture.metadata import TensorMetadata, metadata_values
from megatron.quantscope.capture.verify import verify
from tests.quantscope.capture.conftest import FORMATS_OF_FILES, MODES, linear_tensors, run_iteration
from tests.quantscope.capture.handwritten import RUN, Writer, metadata, offsets, stem

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
W = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def source(tmp_path):
    """An output that is the next input, a weight shown three times in one step and again in the next, unchanged."""
    writer = Writer(tmp_path / "source")
    writer.add(X, tensor_name="output", phase="post")
    writer.add(X, module="decoder.layers.0.mlp.linear_fc2")
    for counter in range(3):
        writer.add(W, tensor_name="weight", micro_batch=counter)
    writer.commit(0)
    writer.add(W, tensor_name="weight", iteration=1)
    writer.commit(1).close()
    return tmp_path / "source"


def left(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_every_row_has_its_file_and_a_weight_one_a_step(source, tmp_path):
    total = export(source, tmp_path / "out")
    before, after = open_capture(source), open_capture(tmp_path / "out")
    assert after.problems == []
    assert after.commits == before.commits
    assert [record.reference for record in after.records] == [False, False, False, True, True, False]
    files = sorted(path.name for path in (tmp_path / "out" / "mxfp8").glob("*.pt"))
    assert len(files) == total.files == 4
    assert total.bytes == sum((tmp_path / "out" / "mxfp8" / name).stat().st_size for name in files)
    for old, new in zip(before.records, after.records, strict=True):
        assert torch.equal(after.load(new), before.load(old))
        assert new.to_dict() == old.to_dict()
        assert (new.counter, new.checksum, new.statistics) == (old.counter, old.checksum, old.statistics)
    assert after.records[4].path == after.records[2].path != after.records[5].path


def test_names_are_those_of_the_segment_s_tensors(source, tmp_path):
    export(source, tmp_path / "out")
    files = {path.stem for path in (tmp_path / "out" / "mxfp8").glob("*.pt")}
    in_segments = {name for path in source.rglob("*.safetensors") for name in offsets(path)}
    assert in_segments < files
    assert stem(6, metadata(W, tensor_name="weight", iteration=1)) in files  # a row that only referred


def test_a_file_needs_torch_alone(source, tmp_path):
    export(source, tmp_path / "out")
    record = open_capture(tmp_path / "out").records[0]
    content = torch.load(record.path, weights_only=True)
    assert set(content) == {"tensor", "metadata"}
    assert torch.equal(content["tensor"], X)
    expected = metadata(X, tensor_name="output", phase="post")
    assert content["metadata"] == expected
    assert TensorMetadata(**metadata_values(content["metadata"])).sample_indices == (0,)
    assert record.path.stat().st_size < X.nbytes + 8192


def test_it_is_whole_and_says_where_it_came_from(source, tmp_path):
    export(source, tmp_path / "out")
    result = verify(tmp_path / "out")
    assert (result.ok, result.findings) == (6, ())
    info = open_capture(tmp_path / "out").run_info["mxfp8"]
    assert info == open_capture(source).run_info["mxfp8"] | {"exported_from": str(source / "mxfp8")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("save_format", FORMATS_OF_FILES)
def test_every_mode_and_format_of_a_session(open_session, tmp_path, mode, save_format):
    session = open_session(mode=mode, save_format=save_format, control_iter=2, collect_micro_batches=2)
    for iteration in range(2):
        run_iteration(session, iteration, micro_batches=2, scalars={"lm loss": float("nan")})
    session.close()
    before = open_capture(session.config.directory)
    export(session.config.directory, tmp_path / "out")
    after = open_capture(tmp_path / "out")
    assert verify(tmp_path / "out").findings == ()
    assert len(after.records) == len(before.records) == 28
    for old, new in zip(before.records, after.records, strict=True):
        assert new.to_dict() == old.to_dict()
        assert new.statistics == old.statistics
        if mode != "statistics":
            assert new.store == "pt"
            assert torch.equal(after.load(new), linear_tensors(new.iteration)[new.tensor_name])
        if mode != "tensors":
            assert torch.equal(after.block_exponents(new), before.block_exponents(old))
    expected = 0 if mode == "statistics" else 2 * (6 + 5)  # the second micro-batch finds the weight there
    assert len(list(tmp_path.glob("out/*/*.pt"))) == expected


def test_a_segment_capture_gives_the_files_of_a_pt_capture(open_session, tmp_path):
    """Session against session: the same rows, kept in each format."""
    held = {}
    for save_format in FORMATS_OF_FILES:
        session = open_session(save_format=save_format, directory=tmp_path / save_format, run_id=RUN)
        run_iteration(session, 0, micro_batches=2)
        session.close()
    export(tmp_path / "segment", tmp_path / "out")
    for folder in ("pt", "out"):
        rows = [
            json.loads(line)
            for line in (tmp_path / folder / "mxfp8" / "runs" / RUN / "manifest_rank0.jsonl").read_text().splitlines()
        ]
        tensors = sorted((row for row in rows if row["kind"] == "tensor"), key=lambda row: row["counter"])
        counted = [row for row in rows if row["kind"] in ("commit", "closed")]
        for row in tensors:
            row["file"] = row["file"][len("20261121_120001") :]
            del row["save_time"], row["bytes"]  # strings are pickled once or twice, as they come
        held[folder] = tensors, [(row["kind"], row["rows"], row["files"]) for row in counted]
    assert held["out"] == held["pt"]


def test_all_ranks_and_types(tmp_path):
    for quant_type in ("mxfp8", "hifp8"):
        for rank in range(2):
            writer = Writer(tmp_path / "in", rank=rank, quant_type=quant_type, world_size=2)
            writer.add(X + rank)
            writer.commit().close()
    export(tmp_path / "in", tmp_path / "out")
    capture = open_capture(tmp_path / "out")
    assert [(record.quant_type, record.rank) for record in capture.records] == [
        ("hifp8", 0), ("hifp8", 1), ("mxfp8", 0), ("mxfp8", 1),
    ]  # fmt: skip
    assert verify(tmp_path / "out").findings == ()


def test_a_second_run_beside_the_first(source, tmp_path):
    export(source, tmp_path / "out")
    other = Writer(source, run="20261121_130000_bbbbbb", created="2026-11-21 13:00:00")
    other.counter = 50
    other.add(X)
    other.commit().close()
    export(source, tmp_path / "out")  # the latest now
    assert open_capture(tmp_path / "out").runs == {"mxfp8": [RUN, "20261121_130000_bbbbbb"]}
    assert len(open_capture(tmp_path / "out", run=RUN).records) == 6
    assert verify(tmp_path / "out").findings == ()
    export(source, tmp_path / "third", run=RUN)
    assert len(open_capture(tmp_path / "third").records) == 6


def test_an_uncommitted_iteration_stays_one(tmp_path):
    writer = Writer(tmp_path / "in")
    writer.add(X)
    writer.commit(committed=False)
    export(tmp_path / "in", tmp_path / "out")
    assert open_capture(tmp_path / "out").problems == open_capture(tmp_path / "in").problems
    assert [finding.kind for finding in verify(tmp_path / "out").findings] == ["uncommitted", "unfinished"]


class TestRefusals:
    def test_a_run_that_is_there(self, source, tmp_path):
        export(source, tmp_path / "out")
        before = left(tmp_path / "out")
        with pytest.raises(CaptureError, match=rf"{RUN} exists and is not overwritten"):
            export(source, tmp_path / "out")
        with pytest.raises(CaptureError, match=rf"{RUN} exists and is not overwritten"):
            export(source, source)
        assert left(tmp_path / "out") == before

    def test_a_file_that_is_there(self, source, tmp_path):
        export(source, tmp_path / "out")
        shutil.rmtree(tmp_path / "out" / "mxfp8" / "runs")
        before = left(tmp_path / "out")
        with pytest.raises(CaptureError, match=r"\.pt exists and is not overwritten"):
            export(source, tmp_path / "out")
        assert left(tmp_path / "out") == before

    def test_no_such_source_or_run(self, source, tmp_path):
        with pytest.raises(CaptureError, match=r"can not read .*none: No such file"):
            export(tmp_path / "none", tmp_path / "out")
        with pytest.raises(CaptureError, match=f"no run nope in .*: there are {RUN}"):
            export(source, tmp_path / "out", run="nope")
        (tmp_path / "empty").mkdir()
        with pytest.raises(CaptureError, match=r"no run that kept anything in .*: there are none"):
            export(tmp_path / "empty", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_type_that_is_no_folder_s_name(self, tmp_path):
        writer = Writer(tmp_path / "in")
        writer.add(X)
        writer.commit().close()
        (writer.folder / "run.json").write_text('{"quant_type": "../../up"}')
        with pytest.raises(CaptureError, match=r"quant_type '../../up' is not allowed"):
            export(tmp_path / "in", tmp_path / "out")


class TestNothingIsLeft:
    def damage(self, source):
        path = sorted(source.rglob("*.safetensors"))[0]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    @pytest.mark.parametrize("there", [False, True])
    def test_of_a_damaged_capture(self, source, tmp_path, there):
        if there:
            (tmp_path / "out" / "mxfp8").mkdir(parents=True)
        self.damage(source)
        with pytest.raises(CaptureError, match=r"is damaged: the tensor of counter . is another than was written"):
            export(source, tmp_path / "out")
        assert (tmp_path / "out").exists() == there
        assert not there or left(tmp_path / "out") == ["mxfp8"]

    def test_of_a_capture_with_a_torn_line(self, source, tmp_path):
        with open(next(source.rglob("manifest*")), "a") as manifest:
            manifest.write('{"torn')
        with pytest.raises(CaptureError, match=r"is damaged: manifest_rank0.jsonl: line"):
            export(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_of_a_missing_segment(self, source, tmp_path):
        next(source.rglob("*.safetensors")).unlink()
        with pytest.raises(CaptureError, match="can not be read: No such file"):
            export(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_when_the_disk_is_full(self, source, tmp_path, monkeypatch):
        write, calls = CaptureFolder.write, []

        def full(self, *args, **options):
            calls.append(args)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")
            return write(self, *args, **options)

        monkeypatch.setattr(CaptureFolder, "write", full)
        with pytest.raises(CaptureError, match="can not write somewhere: No space left on device"):
            export(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_when_the_run_can_not_be_put_in_place(self, source, tmp_path, monkeypatch):
        def refuse(old, new):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(new))

        (tmp_path / "out" / "other").mkdir(parents=True)
        monkeypatch.setattr(os, "rename", refuse)
        with pytest.raises(CaptureError, match=r"can not write .*: Permission denied"):
            export(source, tmp_path / "out")
        assert left(tmp_path / "out") == ["other"]

    def test_where_nothing_can_be_made(self, source, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(CaptureError, match="can not write"):
            export(source, tmp_path / "file" / "out")
        with pytest.raises(CaptureError, match="can not write /proc"):
            export(source, "/proc/self/fdinfo")
        assert (tmp_path / "file").read_text() == "mine"
