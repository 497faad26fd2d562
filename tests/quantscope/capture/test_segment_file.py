"""Reading captures of schema 2: segments, references, maps of block exponents, and what is left when parts are gone."""

import json
import os
import shutil
import time
import warnings

import pytest
import safetensors
import torch

from megatron.quantscope.capture import CaptureError, open_capture
from megatron.quantscope.capture.segment_file import map_tensor, read_header
from tests.quantscope.capture.conftest import ODD_TENSORS, bits, linear_tensors, rows_of, run_iteration
from tests.quantscope.capture.handwritten import RUN, Writer, block_map, offsets

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
Y = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def two_iterations(tmp_path):
    """x, y and x again in iteration 0; y and something new in iteration 1."""
    writer = Writer(tmp_path)
    writer.add(X)
    writer.add(Y, tensor_name="weight")
    writer.add(X, tensor_name="output", phase="post")
    writer.commit(0)
    writer.add(Y, tensor_name="weight", iteration=1)
    writer.add(Y + 1, tensor_name="output", phase="post", iteration=1)
    writer.commit(1, loss=float("nan")).close()
    return tmp_path


def segments(root):
    return sorted(root.glob("*/runs/*/*.safetensors"))


class TestLoad:
    def test_every_row_its_tensor_wherever_the_bytes_are(self, two_iterations):
        capture = open_capture(two_iterations)
        assert capture.problems == []
        assert [record.reference for record in capture.records] == [False, False, True, True, False]
        for record, expected in zip(capture.records, (X, Y, X, Y, Y + 1), strict=True):
            assert torch.equal(capture.load(record), expected)
        assert capture.records[3].path.name.startswith("iter000")  # though it is of iteration 1
        assert capture.commits["mxfp8"].keys() == {0, 1}

    @pytest.mark.parametrize("name", ODD_TENSORS)
    def test_odd_tensors(self, tmp_path, name):
        tensor = ODD_TENSORS[name]().detach().resolve_conj().resolve_neg().contiguous()
        writer = Writer(tmp_path)
        writer.add(torch.ones(3, dtype=torch.int8))  # what follows does not lie at an aligned address
        writer.add(tensor, tensor_name="output")
        writer.commit().close()
        capture = open_capture(tmp_path)
        found = capture.load(capture.records[1])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(found), bits(tensor))

    def test_complex_numbers_that_safetensors_has_no_word_for(self, tmp_path):
        tensor = torch.randn(3, 2, dtype=torch.complex128)
        writer = Writer(tmp_path)
        writer.add(tensor)
        writer.commit().close()
        capture = open_capture(tmp_path)
        assert torch.equal(capture.load(capture.records[0]), tensor)

    def test_what_is_written_to_it_stays_in_memory(self, two_iterations):
        capture, before = open_capture(two_iterations), segments(two_iterations)[0].read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of tensors that can not be written to
            tensor = capture.load(capture.records[0])
            tensor.fill_(7)
        assert segments(two_iterations)[0].read_bytes() == before
        assert torch.equal(capture.load(capture.records[0]), X)
        assert torch.equal(capture.load(capture.records[2]), X)  # the same bytes

    def test_saving_it_saves_the_tensor_alone(self, two_iterations, tmp_path):
        capture = open_capture(two_iterations)
        assert capture.load(capture.records[0]).untyped_storage().nbytes() == X.nbytes
        torch.save(capture.load(capture.records[0]), tmp_path / "x.pt")
        assert (tmp_path / "x.pt").stat().st_size < X.nbytes + 4096

    def test_it_outlives_the_capture_and_the_file_s_name(self, two_iterations):
        capture = open_capture(two_iterations)
        tensor = capture.load(capture.records[0])
        del capture
        shutil.rmtree(two_iterations / "mxfp8")
        assert torch.equal(tensor, X)

    def test_only_what_is_looked_at_is_read(self, tmp_path):
        """A file far larger than the memory, all but a page of it a hole."""
        size, offset = 1 << 42, (1 << 41) + 64
        with open(tmp_path / "huge.safetensors", "wb") as file:
            file.truncate(size)
            file.seek(offset)
            file.write(b"\x01\x02")
        start = time.perf_counter()
        tensor = map_tensor(tmp_path / "huge.safetensors", offset - 64, (1 << 40,), "uint8")
        assert tensor[64:67].tolist() == [1, 2, 0]
        tensor[1 << 39] = 3
        assert tensor[1 << 39] == 3
        assert time.perf_counter() - start < 5

    def test_a_thousand_tensors_hold_no_file_open(self, two_iterations):
        capture = open_capture(two_iterations)
        before = len(os.listdir("/proc/self/fd"))
        held = [capture.load(capture.records[0]) for _ in range(1000)]
        assert len(os.listdir("/proc/self/fd")) == before
        with open("/proc/self/maps") as maps:
            mapped = sum(".safetensors" in line for line in maps)
        del held
        with open("/proc/self/maps") as maps:
            assert sum(".safetensors" in line for line in maps) < mapped - 900

    @pytest.mark.parametrize("dtype", ["load", "float12", "", "nn"])
    def test_what_is_no_dtype(self, two_iterations, dtype):
        with pytest.raises(CaptureError, match=f"of a dtype that torch does not know: '{dtype}'"):
            map_tensor(segments(two_iterations)[0], 0, (2,), dtype)

    def test_beyond_the_end(self, two_iterations):
        path = segments(two_iterations)[0]
        size = path.stat().st_size
        with pytest.raises(CaptureError, match=f"is damaged: {size} bytes, and a tensor ends at {size + 1}"):
            map_tensor(path, size - 1, (2,), "uint8")
        with pytest.raises(CaptureError, match="none can not be read: No such file"):
            map_tensor(path.with_name("none"), 0, (2,), "uint8")


class TestRowsOfTheTable:
    def test_each_is_its_record(self, two_iterations):
        capture = open_capture(two_iterations)
        frame = capture.frame()
        assert {"store", "offset", "document_ids", "grad_scale", "tp_rank", "path", "amax"} <= set(frame.columns)
        shuffled = frame.sample(frac=1, random_state=1).reset_index(drop=True)
        for _, row in shuffled.iterrows():
            assert torch.equal(capture.load(row), capture.load(capture.record_of(row)))
            assert capture.record_of(row).counter == row["counter"]

    def test_beside_bare_files(self, two_iterations):
        name = "20240601_101112_1_linear_L0_forward_mxfp8_input.pt"
        torch.save(torch.ones(3), two_iterations / "mxfp8" / name)
        capture = open_capture(two_iterations)
        frame = capture.frame()
        assert str(frame["offset"].dtype) == "Int64"
        row = frame[frame["store"] == "pt"].iloc[0]
        assert torch.equal(capture.load(row), torch.ones(3))
        assert torch.equal(capture.load(frame[frame["counter"] == 3].iloc[0]), X)

    def test_of_another_capture(self, two_iterations, tmp_path):
        row = open_capture(two_iterations).frame().iloc[0]
        writer = Writer(tmp_path / "other", quant_type="bf16")
        writer.add(X)
        writer.commit()
        with pytest.raises(CaptureError, match="no such row in"):
            open_capture(tmp_path / "other").load(row)


class TestStatisticsOnly:
    @pytest.fixture
    def capture(self, tmp_path):
        writer = Writer(tmp_path)
        for tensor, blocks in ((X, True), (Y, True), (torch.tensor(2.0), True), (torch.zeros(2), False)):
            writer.add(tensor, kept=False, blocks=blocks)
        writer.commit().close()
        return open_capture(tmp_path)

    def test_it_is_a_capture(self, capture):
        assert capture.problems == []
        assert [record.statistics.count for record in capture.records] == [320, 120, 1, 2]
        assert capture.frame()["path"].isna().all()

    def test_there_is_no_tensor_to_load(self, capture):
        for record in (capture.records[0], capture.frame().iloc[0]):
            with pytest.raises(CaptureError, match=r"input of decoder.*: only its statistics were kept") as raised:
                capture.load(record)
            assert "\n" not in str(raised.value)
        assert capture.describe(capture.records[0]) is capture.records[0]

    def test_the_maps_of_block_exponents(self, capture):
        for record, tensor in zip(capture.records[:3], (X, Y, torch.tensor(2.0)), strict=True):
            assert torch.equal(capture.block_exponents(record), block_map(tensor))
        assert capture.block_exponents(capture.frame().iloc[1]).shape == (3, 2)
        assert capture.block_exponents(capture.records[2]).tolist() == [128]
        assert capture.block_exponents(capture.records[3]) is None

    def test_without_any_map_there_is_no_segment(self, tmp_path):
        writer = Writer(tmp_path)
        writer.add(X, kept=False)
        writer.commit().close()
        assert not segments(tmp_path)
        assert open_capture(tmp_path).problems == []


class TestWhatIsGone:
    def problems(self, root):
        return [problem.replace(f"mxfp8/runs/{RUN}", "").lstrip("/") for problem in open_capture(root).problems]

    def test_a_missing_segment_is_named_once_with_its_rows(self, two_iterations):
        segments(two_iterations)[0].unlink()
        capture = open_capture(two_iterations)
        assert self.problems(two_iterations) == [
            "iter000_rank0_000.safetensors: missing, and with it the tensors of 4 rows"
        ]
        assert [record.iteration for record in capture.records] == [1]
        assert torch.equal(capture.load(capture.records[0]), Y + 1)

    def test_a_shorter_segment_takes_the_rows_of_its_end(self, two_iterations):
        path = segments(two_iterations)[0]
        size = path.stat().st_size
        last = max(begin for begin, _ in offsets(path).values())
        os.truncate(path, last + 1)
        found = self.problems(two_iterations)
        assert len(found) == 1
        assert found[0].startswith(
            f"iter000_rank0_000.safetensors: damaged, {last + 1} bytes instead of {size}, and with"
        )
        capture = open_capture(two_iterations)
        assert len(capture.records) == 3
        for record in capture.records:
            assert capture.load(record) is not None

    def test_a_map_that_is_gone_leaves_its_row(self, tmp_path):
        writer = Writer(tmp_path)
        writer.add(X, kept=False, blocks=True)
        writer.commit().close()
        segments(tmp_path)[0].unlink()
        assert self.problems(tmp_path) == [
            "iter000_rank0_000.safetensors: missing, and with it the block maps of 1 rows"
        ]
        capture = open_capture(tmp_path)
        assert capture.records[0].statistics.count == X.numel()
        assert capture.block_exponents(capture.records[0]) is None

    def test_a_killed_run(self, two_iterations):
        run = two_iterations / "mxfp8" / "runs" / RUN
        (run / ".writing-1-2-3").write_bytes(b"half a segment")
        assert self.problems(two_iterations) == [": 1 unfinished files of a run that was killed or still goes on"]

    def test_a_run_that_was_killed_before_its_first_commit(self, two_iterations):
        run = two_iterations / "mxfp8" / "runs" / "20261122_120000_bbbbbb"
        run.mkdir()
        (run / "manifest_rank0.jsonl").touch()
        (run / "run.json").write_text('{"created": "2026-11-22"}')
        (run / ".writing-1-2-3").write_bytes(b"half a segment")
        capture = open_capture(two_iterations)
        assert len(capture.records) == 5
        assert capture.problems == [
            f"mxfp8/run {run.name} kept nothing; 1 unfinished files of a run that was killed or still goes on"
        ]

    def test_an_iteration_without_its_commit(self, tmp_path):
        writer = Writer(tmp_path)
        writer.add(X)
        writer.commit(0)
        writer.add(Y, iteration=1)
        writer.commit(1, committed=False)
        assert self.problems(tmp_path) == ["mxfp8/iteration 1 of rank 0 was not completed: 1 tensors of it are there"]
        assert [record.committed for record in open_capture(tmp_path).records] == [True, False]

    def test_a_segment_that_no_line_names(self, two_iterations):
        shutil.copy(segments(two_iterations)[0], segments(two_iterations)[0].with_name("iter007_rank0_000.safetensors"))
        assert self.problems(two_iterations) == ["iter007_rank0_000.safetensors: no manifest lists it, left out"]


@pytest.mark.parametrize(
    "change",
    [
        {"store": "cloud"},
        {"offset": -8},
        {"offset": None},
        {"file": "../run.json"},
        {"file": ".."},
        {"bytes": -1},
        {"blocks": {"file": "a"}},
        {"blocks": {"file": "/etc/passwd", "offset": 0, "shape": [1], "size": 32, "counts": {}}},
        {"blocks": {"file": "a", "offset": 0, "shape": ["x"], "size": 32, "counts": {}}},
    ],
)
def test_rows_that_are_none(two_iterations, change):
    manifest = next(two_iterations.glob("*/runs/*/manifest_rank0.jsonl"))
    first, second, *rest = manifest.read_text().splitlines()
    manifest.write_text("\n".join([first, json.dumps(json.loads(second) | change), *rest]) + "\n")
    capture = open_capture(two_iterations)
    assert len(capture.records) == 4
    assert "mxfp8/manifest_rank0.jsonl: line 2 is broken and left out" in capture.problems


def test_schema_1_is_read_still(tmp_path):
    """A row as the first release wrote it: no store, one split, SHA-256."""
    writer = Writer(tmp_path)
    writer.add(X, kept=False)
    row = writer.rows[0]
    name = "20261121_120001_0001_iter000_linear_L0_forward_pre_linear_mxfp8_rank0_sample0_input.pt"
    torch.save({"tensor": X, "metadata": {}}, tmp_path / "mxfp8" / name)
    for field in ("store", "offset", "blocks", "document_ids", "grad_scale", "head_dim", "softmax_scale"):
        del row[field]
    row |= {"file": name, "bytes": (tmp_path / "mxfp8" / name).stat().st_size, "checksum": "sha256:0"}
    row |= {"schema": 1, "kind": "tensor", "shard": {"dim": -1, "over": "tp"}}
    commit = {"schema": 1, "kind": "commit", "iteration": 0, "scalars": {"lm loss": 3.0}}
    writer.manifest.write_text(f"{json.dumps(row)}\n{json.dumps(commit)}\n")
    capture = open_capture(tmp_path)
    assert capture.problems == []
    (record,) = capture.records
    assert torch.equal(capture.load(record), X)
    assert record.shard == ({"dim": -1, "over": "tp"},)
    assert (record.store, record.grad_scale, record.document_ids) == ("pt", 1.0, ())
    assert (record.head_dim, record.softmax_scale) == (None, None)


WRONG_OFFSETS = (b"[1, 3]", b"[0, -2]", b'["0", "2"]', b"[0]")


def with_length(text):
    return len(text).to_bytes(8, "little") + text


class TestHeader:
    def test_is_the_library_s(self, two_iterations):
        path = segments(two_iterations)[0]
        header = read_header(path)
        assert header.end == path.stat().st_size
        assert header.labels["run_id"] == RUN
        assert {name: (entry.offset, entry.offset + entry.bytes) for name, entry in header.entries.items()} == offsets(
            path
        )
        with safetensors.safe_open(path, "pt") as file:
            assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
                name: entry.shape for name, entry in header.entries.items()
            }

    @pytest.mark.parametrize(
        "content",
        [b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"{}"]
        + [with_length(text) for text in (b"[]", b"not json!", b'{"a": {}}')]
        + [with_length(b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": %b}}' % at) for at in WRONG_OFFSETS],
    )
    def test_what_is_none(self, tmp_path, content):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(CaptureError, match="has a broken header: ") as raised:
            read_header(tmp_path / "a")
        assert "\n" not in str(raised.value)


def test_a_session_s_segments(open_session):
    session = open_session(save_format="segment", control_iter=2)
    tensors = linear_tensors() | {"output": linear_tensors()["grad_output"]}
    for iteration in range(2):
        run_iteration(session, iteration, tensors=tensors)
    session.close()
    capture = open_capture(session.config.directory)
    assert capture.problems == []
    assert not list(session.config.directory.rglob("*.pt"))
    for record in capture.records:
        assert torch.equal(capture.load(record), tensors[record.tensor_name])
    assert len({record.location for record in capture.records}) == 5
    assert all(record.reference for record in rows_of(capture, iteration=1))
