"""The captures that the benchmark of the analysis makes are captures, each tensor of them one of its own."""

import subprocess
import sys

import pytest
import torch

from megatron.quantscope.analysis.identity import key_of
from megatron.quantscope.analysis.scan import distinct_records
from megatron.quantscope.capture import open_capture
from tests.benchmarks.analysis_capture import repeated_capture
from tests.quantscope.analysis.captures import write_capture


def test_a_repeated_capture_has_tensors_of_its_own(tmp_path):
    source = write_capture(tmp_path / "small", layers=1)
    small = open_capture(source)
    size = sum(record.bytes for record in small.records if not record.reference)
    large = open_capture(repeated_capture(source, tmp_path / "large", 2 * size + 1))
    records = distinct_records(large)
    assert large.problems == []
    assert len(records) == 3 * len(distinct_records(small))
    assert len({key_of(record) for record in records}) == len(records)
    assert torch.equal(large.load(records[0]), small.load(small.records[0]))


@pytest.mark.slow
def test_the_table_has_every_part():
    words = [sys.executable, "-m", "tests.benchmarks.analysis", "--rounds", "1", "--gb", "0.1"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    for expected in ("plain read", "everything, mxfp8", "PSS of all processes", "2880 tensors"):
        assert expected in ran.stdout
