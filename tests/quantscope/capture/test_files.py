"""Files that are complete or absent, names that are never reused, manifests whose lines are whole."""

import errno
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.quantscope.capture import CaptureError, CaptureName, CaptureUsageError
from megatron.quantscope.capture import files as files_module
from megatron.quantscope.capture.files import ByteCounter, place, save_tensor_file
from megatron.quantscope.capture.folder import CaptureFolder, capture_folder
from megatron.quantscope.capture.manifest import ManifestWriter

ROOT = Path(__file__).resolve().parents[3]
NAME = CaptureName(
    stamp="20241201_143022",
    counter=1,
    iteration=0,
    layer_type="linear",
    layer_idx=0,
    operation="forward",
    phase="post",
    component="linear",
    quant_type="bf16",
    rank=0,
    sample_idx=0,
    tensor_name="output",
)


def write_text(text):
    return lambda path: path.write_text(text)


class TestPlace:
    def test_writes_and_tells_the_size(self, tmp_path):
        assert place(tmp_path / "a", write_text("12345")) == 5
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_the_name_appears_when_the_file_is_complete(self, tmp_path):
        def fill(path):
            path.write_text("half")
            assert not list(tmp_path.glob("*.pt"))
            path.write_text("whole")

        place(tmp_path / "a.pt", fill)
        assert (tmp_path / "a.pt").read_text() == "whole"

    def test_an_existing_name_is_an_error_and_keeps_its_content(self, tmp_path):
        (tmp_path / "a").write_text("first")
        with pytest.raises(FileExistsError):
            place(tmp_path / "a", write_text("second"))
        assert (tmp_path / "a").read_text() == "first"
        assert len(list(tmp_path.iterdir())) == 1

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()])
    def test_a_failed_write_leaves_nothing(self, tmp_path, error):
        def fill(path):
            path.write_text("half")
            raise error

        with pytest.raises(type(error)):
            place(tmp_path / "a", fill)
        assert list(tmp_path.iterdir()) == []

    def test_file_systems_without_hard_links(self, tmp_path, monkeypatch):
        def no_link(source, target):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_link)
        assert place(tmp_path / "a", write_text("1")) == 1
        with pytest.raises(FileExistsError):
            place(tmp_path / "a", write_text("2"))
        assert (tmp_path / "a").read_text() == "1"
        assert len(list(tmp_path.iterdir())) == 1

    def test_only_one_of_many_threads_gets_a_name(self, tmp_path):
        outcomes = []

        def run(text):
            try:
                outcomes.append(place(tmp_path / "a", write_text(text)))
            except FileExistsError:
                outcomes.append(None)

        threads = [threading.Thread(target=run, args=(str(index),)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, outcomes)) == ["1", *["None"] * 7]


class TestTensorFile:
    def test_reads_back(self, tmp_path):
        tensor = torch.randn(5, 3).bfloat16()
        save_tensor_file(tmp_path / "a.pt", {"tensor": tensor, "metadata": {"rank": 0}})
        content = torch.load(tmp_path / "a.pt", weights_only=True)
        assert torch.equal(content["tensor"], tensor)
        assert content["metadata"] == {"rank": 0}

    def test_the_system_s_reason_survives_torch(self, tmp_path):
        """A limit on the size of files stands for a full disk: both let a write come to nothing halfway."""
        code = f"""
            import resource, signal, torch
            from pathlib import Path
            from megatron.quantscope.capture.files import save_tensor_file
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            with open(Path({str(tmp_path)!r}) / "a.pt", "wb", buffering=0) as file:
                try:
                    save_tensor_file(file, {{"tensor": torch.zeros(1_000_000)}})
                except OSError as error:
                    print(error.strerror)
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert result.stdout == "File too large\n"

    def test_equal_contents_make_equal_files_whatever_their_names(self, tmp_path):
        for name in ("a.pt", "b.pt"):
            with open(tmp_path / name, "wb") as file:
                save_tensor_file(file, {"tensor": torch.ones(2), "metadata": {"rank": 0}})
        assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()

    def test_counting_without_a_file_is_exact(self, tmp_path):
        content = {"tensor": torch.randn(100, 7), "metadata": {"note": "x" * 1000}}
        counter = ByteCounter()
        save_tensor_file(counter, content)
        with open(tmp_path / "a.pt", "wb") as file:
            save_tensor_file(file, content)
        assert counter.size == (tmp_path / "a.pt").stat().st_size


class TestFolder:
    def content(self):
        return {"tensor": torch.ones(2), "metadata": {}}

    def test_counts_from_one_in_a_new_folder(self, tmp_path):
        folder = CaptureFolder(tmp_path / "none" / "yet", 0)
        assert [folder.next_counter() for _ in range(3)] == [1, 2, 3]

    def test_counts_on_after_the_highest_of_its_rank(self, tmp_path):
        for name in (replace(NAME, counter=41), replace(NAME, counter=12345, rank=1), replace(NAME, counter=7)):
            (tmp_path / name.filename()).touch()
        (tmp_path / "99999_foreign.pt").touch()
        assert CaptureFolder(tmp_path, 0).next_counter() == 42
        assert CaptureFolder(tmp_path, 1).next_counter() == 12346
        assert CaptureFolder(tmp_path, 2).next_counter() == 1

    def test_older_forms_count_for_every_rank(self, tmp_path):
        (tmp_path / "20240601_101112_77_linear_L3_forward_mxfp8_input.pt").touch()
        assert CaptureFolder(tmp_path, 5).next_counter() == 78

    def test_one_folder_object_a_process(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert capture_folder(Path("a"), 0) is capture_folder(tmp_path / "a", 0)
        assert capture_folder(Path("a"), 0) is not capture_folder(Path("a"), 1)

    def test_threads_never_share_a_number(self, tmp_path):
        folder, numbers = CaptureFolder(tmp_path, 0), []
        threads = [
            threading.Thread(target=lambda: numbers.extend(folder.next_counter() for _ in range(200))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(numbers) == list(range(1, 801))

    def test_an_existing_name_is_an_error(self, tmp_path):
        folder = CaptureFolder(tmp_path, 0)
        path, size = folder.write(NAME, self.content())
        assert path.stat().st_size == size
        before = path.read_bytes()
        with pytest.raises(CaptureError, match="exists and is not overwritten"):
            folder.write(NAME, {"tensor": torch.zeros(9), "metadata": {}})
        assert path.read_bytes() == before

    def test_a_bad_name_makes_no_folder(self, tmp_path):
        with pytest.raises(CaptureUsageError):
            CaptureFolder(tmp_path / "new", 0).write(replace(NAME, phase="../.."), self.content())
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_can_not_be_made_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(CaptureError, match=r"can not write .*file.*: Not a directory"):
            CaptureFolder(tmp_path / "file" / "sub", 0).write(NAME, self.content())

    def test_a_full_disk_is_named_and_leaves_nothing(self, tmp_path, monkeypatch):
        def full(file, content):
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("megatron.quantscope.capture.folder.save_tensor_file", full)
        with pytest.raises(CaptureError, match="No space left on device"):
            CaptureFolder(tmp_path, 0).write(NAME, self.content())
        assert list(tmp_path.iterdir()) == []


class TestManifestWriter:
    def test_lines_are_json_of_their_kind(self, tmp_path):
        writer = ManifestWriter(tmp_path / "m.jsonl")
        writer.append("tensor", {"file": "a.pt"})
        writer.append("commit", {"iteration": 0, "scalars": {"lm loss": float("nan")}})
        lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert lines == [
            {"schema": 2, "kind": "tensor", "file": "a.pt"},
            {"schema": 2, "kind": "commit", "iteration": 0, "scalars": {"lm loss": "nan"}},
        ]

    def test_an_existing_manifest_is_not_touched(self, tmp_path):
        (tmp_path / "m.jsonl").write_text("mine")
        with pytest.raises(CaptureError, match="File exists"):
            ManifestWriter(tmp_path / "m.jsonl")
        assert (tmp_path / "m.jsonl").read_text() == "mine"

    def test_a_line_that_does_not_fit_is_taken_back(self, tmp_path):
        code = f"""
            import resource, signal
            from pathlib import Path
            from megatron.quantscope.capture import CaptureError
            from megatron.quantscope.capture.manifest import ManifestWriter
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
            writer = ManifestWriter(Path({str(tmp_path)!r}) / "m.jsonl")
            for number in range(9):
                try:
                    writer.append("closed", {{"rows": number}})
                except CaptureError as error:
                    print(number, str(error).partition("m.jsonl: ")[2])
                    break
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        count = int(result.stdout.split()[0])
        assert result.stdout == f"{count} File too large\n"
        text = (tmp_path / "m.jsonl").read_text()
        assert [json.loads(line)["rows"] for line in text.splitlines()] == list(range(count))
        assert text.endswith("\n")

    def test_lines_of_many_threads_are_whole(self, tmp_path):
        writer = ManifestWriter(tmp_path / "m.jsonl")
        numbers = itertools.count()
        threads = [
            threading.Thread(
                target=lambda: [writer.append("closed", {"rows": next(numbers), "pad": "x" * 5000}) for _ in range(50)]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = [json.loads(line)["rows"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert sorted(rows) == list(range(200))


def test_temporary_names_are_never_captures():
    assert files_module.TEMPORARY_PREFIX.startswith(".")
