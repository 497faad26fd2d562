"""The whole way, from a capture's directory to an output directory."""

from concurrent.futures.process import BrokenProcessPool

import pandas as pd
import pytest

from megatron.quantscope.analysis.scan import distinct_records
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.draw import DrawError, draw, figures_for
from megatron.quantscope.report.figures import FIGURES, QUICK, TOPICS
from megatron.quantscope.report.progress import Progress
from tests.quantscope.analysis.captures import write_capture


def drawn(directory, output, *, run=None, quick=True, only=None, **settings):
    figures, capture = figures_for(quick=quick, only=only), open_capture(directory, run=run)
    return draw(capture, output, workers=1, figures=figures, progress=Progress(shown=False), **settings)


def test_tables_texts_and_the_quick_figure(tmp_path):
    capture = write_capture(tmp_path / "in", layers=1)
    result = drawn(capture, tmp_path / "deep" / "out")
    assert sorted(str(path.relative_to(tmp_path / "deep" / "out")) for path in (tmp_path / "deep").rglob("*.*")) == [
        "global_statistics/global_statistics.json",
        "global_statistics/global_statistics.txt",
        "index.parquet",
        "quick_analysis.png",
        "summary.parquet",
        "tensor_stats.txt",
    ]
    assert result.open_first == tmp_path / "deep" / "out" / "quick_analysis.png"
    assert (result.files, result.problems) == (32, [])
    assert len(pd.read_parquet(tmp_path / "deep" / "out" / "index.parquet")) == 36


def test_a_second_time_nothing_is_read(tmp_path):
    capture = write_capture(tmp_path / "in", layers=1)
    results = [drawn(capture, tmp_path / "out") for _ in range(2)]
    assert [(result.files, result.reused) for result in results] == [(32, 0), (32, 32)]


def test_figures_of_other_kinds_are_the_same_bytes_each_time(tmp_path):
    capture = write_capture(tmp_path / "in", layers=1)
    for suffix in ("svg", "pdf", "png"):
        twice = []
        for number in (1, 2):
            result = drawn(capture, tmp_path / f"{suffix}{number}", suffix=suffix)
            assert result.open_first == tmp_path / f"{suffix}{number}" / f"quick_analysis.{suffix}"
            twice.append(result.open_first.read_bytes())
        assert twice[0] == twice[1]
        assert b"<dc:date>" not in twice[0]


def test_everything_opens_with_the_page(tmp_path):
    result = drawn(write_capture(tmp_path / "in", layers=1), tmp_path / "out", quick=False)
    assert result.open_first == tmp_path / "out" / "report.html"
    assert result.figures.failed == {}
    assert (tmp_path / "out" / "quick_analysis.png").is_file()


def test_the_latest_run_or_the_one_that_is_named(tmp_path):
    write_capture(tmp_path / "in", layers=1, run_id="20261121_120000_aaaaaa")
    write_capture(tmp_path / "in", layers=2, run_id="20261121_130000_bbbbbb")
    assert drawn(tmp_path / "in", tmp_path / "out").files == 64
    assert drawn(tmp_path / "in", tmp_path / "out", run="20261121_120000_aaaaaa").files == 32


def test_problems_are_listed_and_the_rest_is_drawn(tmp_path):
    capture = open_capture(write_capture(tmp_path / "in", layers=1))
    truncated, broken = (record.path for record in distinct_records(capture)[:2])
    truncated.write_bytes(truncated.read_bytes()[:1000])
    content = bytearray(broken.read_bytes())
    content[40:400] = b"\xff" * 360
    broken.write_bytes(content)
    (tmp_path / "in" / "mxfp8" / "notes.pt").write_text("not a tensor")
    result = drawn(tmp_path / "in", tmp_path / "out")
    assert result.files == 30
    assert len(result.problems) == 3
    text = (tmp_path / "out" / "tensor_stats.txt").read_text()
    for name in (truncated.name, broken.name, "notes.pt"):
        assert name in text.partition("== not read: 3")[2]


def test_nothing_readable_is_an_error_and_leaves_no_table(tmp_path):
    capture = open_capture(write_capture(tmp_path / "in", layers=1))
    for record in distinct_records(capture):
        record.path.write_bytes(b"PK\x03\x04" + b"\xff" * (record.bytes - 26) + b"PK\x05\x06" + b"\xff" * 18)
    with pytest.raises(DrawError, match="none of the 32 files"):
        drawn(tmp_path / "in", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_an_output_that_can_not_be_written_is_one_line(tmp_path, place):
    write_capture(tmp_path / "in", layers=1)
    (tmp_path / "out").write_text("a file")
    target = tmp_path / "out" if place == "file" else tmp_path / "out" / "below"
    with pytest.raises(DrawError, match=r"can not write .*out") as error:
        drawn(tmp_path / "in", target)
    assert "\n" not in str(error.value)
    assert (tmp_path / "out").read_text() == "a file"


def test_a_directory_that_refuses_files_is_one_line(tmp_path):
    write_capture(tmp_path / "in", layers=1)
    with pytest.raises(DrawError, match="can not write /proc"):
        drawn(tmp_path / "in", "/proc/self/fdinfo")  # refuses root, too


def test_quick_only_and_everything():
    assert figures_for(quick=True, only=None) == (QUICK,)
    assert figures_for(quick=False, only=None) == FIGURES
    for topic in TOPICS:
        assert {spec.topic for spec in figures_for(quick=False, only=topic)} == {topic}


def test_runs_are_compared_only_where_a_figure_needs_it(tmp_path):
    for quant_type, seed in (("bf16", 0), ("mxfp8", 1)):
        write_capture(tmp_path / "in", quant_type, layers=1, seed=seed)
    table, out = tmp_path / "out" / "comparison.parquet", tmp_path / "out"
    for settings in ({"quick": True}, {"only": "rank_analysis"}):
        drawn(tmp_path / "in", out, **{"quick": False, **settings})
        assert not table.exists()
    result = drawn(tmp_path / "in", out, quick=False, only="comparisons")
    assert len(pd.read_parquet(table)) == 32
    assert (out / "comparisons" / "divergence.png").relative_to(out) in result.figures.written


def test_a_worker_that_is_killed_while_drawing_is_one_line(tmp_path, monkeypatch):
    def killed(*args, **more):
        raise BrokenProcessPool("a\nb")

    monkeypatch.setattr("megatron.quantscope.report.draw.render", killed)
    with pytest.raises(DrawError, match="a worker was killed"):
        drawn(write_capture(tmp_path / "in", layers=1), tmp_path / "out")


def test_only_one_topic_opens_that_topic(tmp_path):
    result = drawn(write_capture(tmp_path / "in", layers=1), tmp_path / "out", quick=False, only="rank_analysis")
    assert result.open_first == tmp_path / "out" / "rank_analysis" / "ranks_mxfp8.png"
    assert not (tmp_path / "out" / "quick_analysis.png").exists()
