"""`--tensor-fsync`: before a commit, all that it speaks of would survive a power cut."""

import os

import pytest

from megatron.quantscope.capture.manifest import ManifestWriter
from tests.quantscope.capture.conftest import (
    MODES,
    run_folder,
    run_iteration,
)


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
