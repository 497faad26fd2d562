"""A disk that breaks at one point of writing, and what tests of faults ask for afterwards."""

import logging
import os
import time

from megatron.quantscope.capture import folder
from megatron.quantscope.capture import segment_writer as segment_writer_module
from megatron.quantscope.capture.files import TEMPORARY_PREFIX

PATIENCE_S = 120  # the first statistics of a machine wait for a compiler

KINDS = {
    "pt": {"save_format": "pt"},
    "pt with blocks": {"save_format": "pt", "mode": "both"},
    "segment": {"save_format": "segment"},
    "segment with blocks": {"save_format": "segment", "mode": "both"},
    "statistics": {"mode": "statistics"},
}


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def written(session):
    """Bytes of the tensor files and segments that are there."""
    found = session.config.directory.rglob("*")
    return sum(path.stat().st_size for path in found if path.suffix in (".pt", ".safetensors"))


def await_commits(session, iterations):
    end = time.monotonic() + PATIENCE_S
    while session.summary().iterations < iterations:
        assert time.monotonic() < end
        time.sleep(0.002)


class Disk:
    """Breaks at one point of writing, from now on; a write that breaks takes a half of what it is given."""

    def __init__(self, monkeypatch, session, error):
        self.patch = monkeypatch.setattr
        self.session = session
        self.error = error

    def fail(self, *args, **options):
        raise self.error

    def file(self):
        def half(file, content):
            file.write(b"half a file")
            raise self.error

        self.patch(folder, "save_tensor_file", half)

    def tensor_name(self):
        self.patch("megatron.quantscope.capture.files.give_name", self.fail)

    def segment_made(self):
        make = os.open

        def refuse(path, flags, *mode, **options):
            if TEMPORARY_PREFIX in str(path) and flags & os.O_CREAT:
                raise self.error
            return make(path, flags, *mode, **options)

        self.patch(segment_writer_module.os, "open", refuse)

    def pwrite(self, broken):
        write = os.pwrite

        def limited(file, content, offset):
            if not broken(content, offset):
                return write(file, content, offset)
            write(file, content[: len(content) // 2], offset)
            raise self.error

        self.patch(segment_writer_module.os, "pwrite", limited)

    def segment_room(self):
        self.pwrite(lambda content, offset: offset == 0 and not bytes(content).strip())

    def segment_tensor(self):
        self.pwrite(lambda content, offset: offset > 0)

    def segment_header(self):
        self.pwrite(lambda content, offset: offset == 0 and bytes(content).strip())

    def segment_name(self):
        self.patch(segment_writer_module, "give_name", self.fail)

    def manifest(self):
        file, error = self.session._sink._manifest._file, self.error

        class Half:
            def __getattr__(self, name):
                return getattr(file, name)

            def write(self, line):
                file.write(line[: len(line) // 2])
                raise error

        self.session._sink._manifest._file = Half()
