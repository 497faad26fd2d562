"""Checking captures: whole ones pass, and whatever is done to one is named."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron.quantscope.capture import CaptureError, TensorSaver, open_capture
from megatron.quantscope.capture.report import KINDS, Finding
from megatron.quantscope.capture.state import TensorCollectionState
from megatron.quantscope.capture.verify import verify
from tests.quantscope.capture.conftest import FORMATS_OF_FILES, LINEAR, linear_tensors, run_iteration, show_forward
from tests.quantscope.capture.handwritten import RUN, Writer, offsets

X = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
Y = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def segment_root(tmp_path):
    """Written by hand: tensors, references, maps, an empty tensor and one without a word; two iterations."""
    writer = Writer(tmp_path / "root")
    writer.add(X, blocks=True)
    writer.add(Y, tensor_name="weight", blocks=True)
    writer.add(X, tensor_name="output", phase="post")
    writer.commit(0)
    writer.add(Y, tensor_name="weight", iteration=1)
    writer.add(torch.zeros(0, 3), iteration=1)
    writer.add(torch.ones(3, dtype=torch.complex128), tensor_name="output", iteration=1)
    writer.add(Y, kept=False, tensor_name="query", iteration=1)
    writer.commit(1)
    writer.close()
    return tmp_path / "root"


@pytest.fixture(params=FORMATS_OF_FILES)
def session_root(request, open_session):
    """Written by sessions: two types, two iterations, in each format."""
    for quant_type in ("mxfp8", "hifp8"):
        session = open_session(quant_type=quant_type, control_iter=2, save_format=request.param)
        for iteration in range(2):
            run_iteration(session, iteration, micro_batches=2)
        session.close()
    return session.config.directory


def found(root, run=None):
    return [(finding.kind, os.path.basename(finding.file)) for finding in verify(root, run).findings]


def run_folder(root, quant_type="mxfp8"):
    return next((root / quant_type / "runs").iterdir())


def segment(root, iteration=0):
    return run_folder(root) / f"iter{iteration:03d}_rank0_000.safetensors"


def change_line(root, number, change, rank=0):
    """Rewrite one line of a manifest; `change(entry)` gives the new entry, or text."""
    path = run_folder(root) / f"manifest_rank{rank}.jsonl"
    lines = path.read_text().splitlines()
    changed = change(json.loads(lines[number]))
    lines[number] = changed if isinstance(changed, str) else json.dumps(changed)
    path.write_text("\n".join(line for line in lines if line) + "\n")


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


class TestWhole:
    def test_by_hand(self, segment_root):
        result = verify(segment_root)
        assert result.findings == ()
        assert result.ok == 7
        maps = 2 * 2 + 2 * 2
        assert result.bytes == X.nbytes + Y.nbytes + 3 * 16 + maps

    def test_by_sessions(self, session_root):
        result = verify(session_root)
        assert result.findings == ()
        assert result.ok == len(open_capture(session_root).records)
        assert verify(session_root / "mxfp8").findings == ()

    @pytest.mark.parametrize("mode", ["statistics", "both"])
    def test_by_sessions_of_other_modes(self, open_session, mode):
        for save_format in FORMATS_OF_FILES:
            session = open_session(mode=mode, save_format=save_format, run_id=f"20260101_000000_{save_format}")
            run_iteration(session, 0)
            session.close()
        result = verify(session.config.directory)
        assert result.findings == ()
        assert result.ok == 14

    def test_a_user_s_own_saves_are_not_foreign(self, session_root):
        before = verify(session_root).ok
        saver = TensorSaver(session_root, state=TensorCollectionState())
        saver.save_tensor(torch.ones(2), "linear", "forward", "mxfp8", "mine")
        result = verify(session_root)
        assert (result.ok, result.findings) == (before + 1, ())

    def test_a_folder_of_bare_files(self, tmp_path):
        torch.save(torch.ones(2), tmp_path / "20240601_101112_2_attention_L3_forward_mxfp8_query.pt")
        assert verify(tmp_path) == verify(tmp_path, "all")
        assert (verify(tmp_path).ok, verify(tmp_path).findings) == (1, ())

    def test_findings_are_records(self):
        finding = Finding(kind="damaged", file="a", message="b")
        with pytest.raises(dataclasses.FrozenInstanceError):
            finding.kind = "missing"


class TestSegments:
    def test_every_changed_byte_is_found(self, segment_root):
        """Each byte of a segment in turn: its tensors, its maps and its header."""
        path = segment(segment_root)
        whole = path.read_bytes()
        header = range(8 + int.from_bytes(whole[:8], "little"))
        for offset in (*header, *range(len(header), len(whole), 3)):
            content = bytearray(whole)
            content[offset] ^= 0x02
            path.write_bytes(content)
            assert verify(segment_root, RUN).findings, (offset, whole[offset - 20 : offset + 20])

    def test_a_damaged_tensor_names_its_rows(self, segment_root):
        begin, _ = offsets(segment(segment_root))[
            next(n for n in offsets(segment(segment_root)) if n.endswith("input"))
        ]
        flip(segment(segment_root), begin)
        result = verify(segment_root)
        assert [finding.message for finding in result.findings] == [
            f"the tensor of counter {counter} is another than was written: its xxh3_128 differs" for counter in (1, 3)
        ]
        assert result.ok == 5
        assert result.findings[0].file == f"mxfp8/runs/{RUN}/iter000_rank0_000.safetensors"

    def test_a_damaged_map(self, segment_root):
        names = offsets(segment(segment_root))
        begin, _ = names[next(name for name in names if name.endswith("weight.block_exponents"))]
        flip(segment(segment_root), begin)
        assert found(segment_root) == [("damaged", "iter000_rank0_000.safetensors")]
        assert "the block map of counter 2 is another than was written" in verify(segment_root).findings[0].message

    def test_a_missing_segment(self, segment_root):
        segment(segment_root).unlink()
        assert found(segment_root) == [("missing", "iter000_rank0_000.safetensors")]
        message = verify(segment_root).findings[0].message
        assert message == "missing, and with it the tensors of 4 rows and the block maps of 2"

    def test_a_short_segment(self, segment_root):
        os.truncate(segment(segment_root), segment(segment_root).stat().st_size - 1)
        assert {kind for kind, _ in found(segment_root)} == {"damaged"}

    def test_an_appended_byte(self, segment_root):
        with open(segment(segment_root), "ab") as file:
            file.write(b"x")
        assert {kind for kind, _ in found(segment_root)} == {"damaged"}

    def test_a_segment_of_another_run(self, segment_root, tmp_path):
        other = Writer(tmp_path / "other", run="20261121_130000_bbbbbb")
        other.add(X)
        other.commit(0)
        shutil.copy(segment(tmp_path / "other"), segment(segment_root).with_name("iter009_rank0_000.safetensors"))
        messages = [finding.message for finding in verify(segment_root).findings]
        assert f"its header says run_id 20261121_130000_bbbbbb, its run {RUN}" in messages
        assert {kind for kind, _ in found(segment_root)} == {"damaged", "uncommitted"}

    def test_a_lost_row(self, segment_root):
        change_line(segment_root, 1, lambda entry: "")
        assert found(segment_root) == [
            ("missing", "manifest_rank0.jsonl"),  # the commit counts it
            ("missing", "iter000_rank0_000.safetensors"),  # its map
        ]

    @pytest.mark.parametrize("change", [{"bytes": 4}, {"dtype": "float64"}, {"shape": [2, 2]}, {"dtype": "none"}])
    def test_a_row_that_contradicts_itself(self, segment_root, change):
        change_line(segment_root, 1, lambda entry: entry | change)
        assert ("damaged", "iter000_rank0_000.safetensors") in found(segment_root)

    def test_a_map_of_another_shape(self, segment_root):
        change_line(segment_root, 1, lambda entry: entry | {"blocks": entry["blocks"] | {"shape": [4, 1]}})
        messages = [finding.message for finding in verify(segment_root).findings]
        assert any("has the shape [4, 1], for a tensor of (2, 64)" in message for message in messages)


class TestTensorFiles:
    def path(self, root, ending="_input.pt"):
        return next(path for path in sorted((root / "mxfp8").iterdir()) if path.name.endswith(ending))

    @pytest.fixture
    def root(self, open_session):
        session = open_session()
        run_iteration(session, 0)
        session.close()
        return session.config.directory

    def test_a_changed_element(self, root):
        path = self.path(root)
        at = path.read_bytes().index(bytes(linear_tensors()["input"].view(torch.uint8).numpy()))
        flip(path, at)
        assert found(root) == [("damaged", path.name)]

    def test_a_weight_takes_the_rows_that_refer_to_it_along(self, root):
        self.path(root, "_weight.pt").unlink()
        (finding,) = verify(root).findings
        assert (finding.kind, finding.message) == ("missing", "missing, and with it the tensor of 2 rows")
        assert verify(root).ok == 5

    @pytest.mark.parametrize("keep", [0, 100])
    def test_truncated(self, root, keep):
        path = self.path(root)
        size = path.stat().st_size
        os.truncate(path, keep)
        (finding,) = verify(root).findings
        assert (finding.kind, finding.message) == ("damaged", f"{keep} bytes instead of {size}")

    def test_of_the_same_size_but_no_file_of_torch(self, root):
        path = self.path(root)
        path.write_bytes(b"x" * path.stat().st_size)
        (finding,) = verify(root).findings
        assert (finding.kind, finding.message) == ("damaged", "is not a torch file")

    @pytest.mark.parametrize("change", [{"iteration": 8}, {"module": "other"}, {"shard": [{"over": "tp", "dim": 0}]}])
    def test_metadata_that_differs_from_the_row(self, root, change):
        change_line(root, 0, lambda entry: entry | change)
        (name,) = change
        findings = verify(root).findings
        assert f"its metadata differs from its row in {name}" in [finding.message for finding in findings]

    def test_files_that_were_swapped(self, root):
        one, other = self.path(root, "_grad_output.pt"), self.path(root, "_output.pt")
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        assert sorted(found(root)) == sorted([("damaged", one.name), ("damaged", other.name)])

    def test_a_broken_bare_file(self, root):
        name = "20240601_101112_2_attention_L3_forward_mxfp8_query.pt"
        (root / "mxfp8" / name).write_bytes(b"PK\x03\x04" + bytes(40))
        assert found(root) == [("damaged", name)]


class TestRuns:
    def test_what_a_killed_run_leaves(self, segment_root):
        (run_folder(segment_root) / ".writing-1-2-3").write_bytes(b"half")
        change_line(segment_root, -1, lambda entry: "")  # closed
        change_line(segment_root, -1, lambda entry: "")  # commit of iteration 1
        assert found(segment_root) == [
            ("unfinished", ".writing-1-2-3"),
            ("uncommitted", "manifest_rank0.jsonl"),
            ("unfinished", "manifest_rank0.jsonl"),
        ]
        assert verify(segment_root).ok == 7

    def test_a_torn_line(self, segment_root):
        path = run_folder(segment_root) / "manifest_rank0.jsonl"
        path.write_text(path.read_text() + '{"schema": 2, "ki')
        assert found(segment_root) == [("broken-line", "manifest_rank0.jsonl")]

    def test_a_row_that_lacks_a_field(self, segment_root):
        change_line(segment_root, 1, lambda entry: {key: value for key, value in entry.items() if key != "layer_type"})
        assert ("broken-line", "manifest_rank0.jsonl") in found(segment_root)

    @pytest.mark.parametrize("name", ["rows", "files", "bytes"])
    def test_a_commit_that_counts_otherwise(self, segment_root, name):
        change_line(segment_root, 4, lambda entry: entry | {name: entry[name] + 1})
        assert found(segment_root) == [("missing", "manifest_rank0.jsonl")]

    def test_run_json(self, segment_root):
        (run_folder(segment_root) / "run.json").write_text("{broken")
        assert found(segment_root) == [("damaged", "run.json")]
        (run_folder(segment_root) / "run.json").unlink()
        assert found(segment_root) == [("missing", "run.json")]

    def test_a_rank_whose_manifest_is_not_there(self, tmp_path):
        for rank in range(3):
            Writer(tmp_path, rank=rank, world_size=3).close()
        assert found(tmp_path) == []
        (run_folder(tmp_path) / "manifest_rank1.jsonl").unlink()
        assert found(tmp_path) == [("missing", "manifest_rank1.jsonl")]

    def test_ranks_that_the_filter_left_out(self, tmp_path):
        Writer(tmp_path, rank=1, world_size=3, capture={"filter": {"ranks": [[1, 1]]}}).close()
        assert found(tmp_path) == []

    def test_one_run_alone(self, segment_root):
        other = Writer(segment_root, run="20261121_130000_bbbbbb")
        other.add(X)
        other.commit(0).close()
        (segment_root / "mxfp8" / "runs" / "20261121_130000_bbbbbb" / "iter000_rank0_000.safetensors").unlink()
        (segment_root / "notes.txt").write_text("x")
        assert found(segment_root, RUN) == []
        assert found(segment_root, "20261121_130000_bbbbbb") == [("missing", "iter000_rank0_000.safetensors")]
        assert len(found(segment_root)) == len(found(segment_root, "all")) == 2

    def test_every_kind_is_one_of_those_that_are_told(self, segment_root):
        (segment_root / "notes.txt").write_text("x")
        assert {kind for kind, _ in found(segment_root)} <= set(KINDS)


def test_foreign_and_unfinished_files_everywhere(segment_root):
    inside = segment_root / "mxfp8"
    for path in (
        segment_root / "notes.txt",
        inside / ".hidden",
        inside / "model.pt",
        run_folder(segment_root) / "a.txt",
    ):
        path.write_text("x")
    for folder in (segment_root / "draw", inside / "runs" / ".writing-1", segment_root / ".writing-2"):
        folder.mkdir()
    (inside / "runs" / "stray").write_text("x")
    (inside / ".writing-1-1-1").write_text("x")
    assert sorted(found(segment_root)) == sorted(
        [("foreign", name) for name in ("notes.txt", ".hidden", "model.pt", "a.txt", "draw", "stray")]
        + [("unfinished", name) for name in (".writing-1", ".writing-2", ".writing-1-1-1")]
    )


@pytest.mark.parametrize("name", ["none", "file", "empty"])
def test_what_is_no_capture(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptureError) as raised:
        verify(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_an_unknown_run(segment_root):
    with pytest.raises(CaptureError, match=f"no run nope in .*: there are {RUN}"):
        verify(segment_root, "nope")


def test_after_sigterm_rows_of_the_running_iteration_are_uncommitted(open_session):
    session = open_session(control_iter=2, save_format="segment")
    run_iteration(session, 0)
    session.begin_iteration(1)
    session.begin_micro_batch(0, [1])
    show_forward(session.site(**LINEAR).tap(), linear_tensors(1))
    session.close()
    findings = verify(session.config.directory).findings
    assert [finding.kind for finding in findings if finding.kind != "unfinished"] == ["uncommitted"]


PEAKS = """
import sys, threading
import torch
from megatron.quantscope.capture.verify import verify

def allocated():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.001):
        seen.append(allocated())

for directory in sys.argv[1:]:
    done, seen = threading.Event(), [allocated()]
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = verify(directory)
    done.set()
    watcher.join()
    assert result.ok == 4 and not result.findings, result
    print(max(seen))
"""


def test_memory_stays_bounded(tmp_path):
    """The peak of what a process allocates to check a large segment, over that of a small one."""
    for name, elements in (("small", 1 << 10), ("large", 1 << 23)):
        writer = Writer(tmp_path / name)
        for index in range(4):
            writer.add(torch.from_numpy(np.full(elements, index, np.float32)), tensor_name=f"t{index}")
        writer.commit().close()
    command = [sys.executable, "-c", PEAKS, str(tmp_path / "small"), str(tmp_path / "small"), str(tmp_path / "large")]
    _, small, large = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert 0 < large < small + 20_000  # kB; the large one holds 134 MB
