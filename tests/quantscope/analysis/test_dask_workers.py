"""The same tables from a Dask cluster as from this process, and one line where there is no cluster."""

import socket
import sys

import pytest

pytest.importorskip("distributed")
from distributed import LocalCluster

from megatron.quantscope.analysis.analyse import AnalysisError, analyse
from megatron.quantscope.analysis.dask_workers import dask_pool
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.progress import Progress
from tests.quantscope.analysis.captures import write_capture

QUIET = Progress(shown=False)


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
    ) as cluster:
        yield cluster


def test_tables_are_those_of_this_process_bit_for_bit(cluster, tmp_path):
    capture = open_capture(write_capture(tmp_path / "in", layers=2))
    analyse(capture, tmp_path / "alone", 1, QUIET, ["mxfp8"], details=False)
    study = analyse(capture, tmp_path / "dask", 1, QUIET, ["mxfp8"], cluster.scheduler_address)
    assert study.scan.files == 64
    assert study.surfaces
    for name in ("summary.parquet", "index.parquet"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "dask" / name).read_bytes()


def test_results_come_in_order_and_an_error_comes_out_here(cluster):
    with dask_pool(cluster.scheduler_address) as workers:
        assert workers.count == 2
        assert list(workers.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        with pytest.raises(TypeError):
            list(workers.map(len, [3]))


def test_a_damaged_file_is_listed_and_the_rest_is_read(cluster, tmp_path):
    capture = open_capture(write_capture(tmp_path / "in", layers=1))
    capture.records[0].path.unlink()
    study = analyse(capture, tmp_path / "out", 1, QUIET, ["mxfp8"], cluster.scheduler_address, details=False)
    assert (len(study.problems), len(study.summary)) == (1, 31)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "nonsense://x", "127.0.0.1:99999999"])
def test_no_scheduler_there_is_one_line(address, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.quantscope.analysis.dask_workers.CONNECT_SECONDS", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = address.format(port=taken.getsockname()[1])
    capture = open_capture(write_capture(tmp_path / "in", layers=1))
    with pytest.raises(AnalysisError, match="no Dask scheduler answers at") as error:
        analyse(capture, tmp_path / "out", 1, QUIET, ["mxfp8"], address)
    assert address in str(error.value)
    assert "\n" not in str(error.value)


def test_without_dask_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    capture = open_capture(write_capture(tmp_path / "in", layers=1))
    with pytest.raises(AnalysisError, match=r"pip install 'dask\[distributed\]'"):
        analyse(capture, tmp_path / "out", 1, QUIET, ["mxfp8"], "tcp://127.0.0.1:1")


def test_a_cluster_without_workers_is_one_line(tmp_path):
    capture = open_capture(write_capture(tmp_path / "in", layers=1))
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None, protocol="tcp") as empty:
        address = empty.scheduler_address
        with pytest.raises(AnalysisError, match="has no workers"):
            analyse(capture, tmp_path / "out", 1, QUIET, ["mxfp8"], address)
