"""What is mapped is what torch loads, and what is not plainly a tensor's file is left to torch."""

from dataclasses import replace
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch

from megatron.quantscope.analysis.pt_location import pt_location
from megatron.quantscope.capture import open_capture
from tests.quantscope.analysis.captures import save, write_capture


@pytest.fixture
def record(tmp_path):
    return open_capture(write_capture(tmp_path, layers=1)).records[0]


def test_every_tensor_is_that_of_torch(tmp_path):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        write_capture(tmp_path / str(dtype), layers=1, dtype=dtype)
        for record in open_capture(tmp_path / str(dtype)).records:
            location = pt_location(record)
            assert location.offset > 0
            mapped = location.load()
            assert mapped.dtype == dtype
            assert torch.equal(mapped, torch.load(record.path, weights_only=True)["tensor"])


def test_only_records_of_pt_files_that_a_manifest_lists(tmp_path, record):
    assert pt_location(replace(record, run_folder=None)) is None
    assert pt_location(replace(record, path=None)) is None
    assert pt_location(replace(record, dtype=None)) is None
    segment = write_capture(tmp_path / "segment", layers=1, save_format="segment")
    assert {pt_location(record) for record in open_capture(segment).records} == {None}


@pytest.mark.parametrize("shape", [(32, 1, 47), (32, 1, 96), ()])
def test_another_shape_than_the_manifest_says(record, shape):
    assert pt_location(replace(record, shape=shape)) is None


def test_files_that_another_tool_wrote(tmp_path, record):
    x = torch.ones(32, 1, 48, dtype=torch.bfloat16)
    two = tmp_path / "two.pt"
    torch.save({"tensor": x, "metadata": {"mask": torch.ones(3)}}, two)
    old = tmp_path / "old.pt"
    torch.save(x, old, _use_new_zipfile_serialization=False)
    packed = tmp_path / "packed.pt"
    with ZipFile(save(tmp_path / "plain.pt", x)) as source, ZipFile(packed, "w", ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert pt_location(replace(record, path=tmp_path / "plain.pt")) is not None
    for path in (two, old, packed, tmp_path / "nothing.pt"):
        assert pt_location(replace(record, path=path)) is None


@pytest.mark.parametrize(("start", "size"), [(0, 4), (30, 20), (40, 360), (-200, 150), (-22, 22)])
def test_damage_is_left_to_torch_to_tell(record, start, size):
    content = bytearray(record.path.read_bytes())
    start %= len(content)
    content[start : start + size] = b"\xff" * size
    record.path.write_bytes(content)
    assert pt_location(record) is None


def test_a_file_that_was_cut(record):
    record.path.write_bytes(record.path.read_bytes()[:-500])
    assert pt_location(record) is None
