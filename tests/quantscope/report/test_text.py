import json

import pytest

from megatron.quantscope.report import numbers
from megatron.quantscope.report.text import aligned, write_texts
from tests.quantscope.analysis.captures import write_capture


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (36912345, "36.9 M"), (999.6e6, "1 G"), (2.5e12, "2.5 T")],
)
def test_counts(value, text):
    assert numbers.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 B"), (733837760, "734 MB"), (3.67e9, "3.67 GB")])
def test_sizes(value, text):
    assert numbers.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 %"), (1e-5, "< 0.01 %"), (0.0315, "0.0315 %"), (12.345, "12.3 %"), (99.999, "99.999 %"), (100, "100 %"),
     (float("nan"), "-")],
)  # fmt: skip
def test_nothing_little_and_almost_all_differ(value, text):
    assert numbers.percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(22592.0, "22592"), (0.0, "0"), (3.1e-7, "3.10e-07"), (0.25, "0.25"), (1.5e30, "1.50e+30"), (None, "-"),
     (float("nan"), "-"), (-2.5, "-2.5")],
)  # fmt: skip
def test_magnitudes(value, text):
    assert numbers.magnitude(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(31.25, "31.2"), (float("inf"), "exact"), (-float("inf"), "lost"), (float("nan"), "-")]
)
def test_decibels(value, text):
    assert numbers.decibels(value) == text


def test_columns_line_up():
    assert aligned([("a", "1"), ("long", "22")]) == "a      1\nlong  22"
    assert aligned([]) == ""


def test_texts_hold_the_numbers(wide_study, tmp_path):
    write_texts(wide_study, tmp_path)
    text = (tmp_path / "tensor_stats.txt").read_text()
    for expected in ("== BF16: ", "== HiF8: ", "fc2.x", "== not read: 0"):
        assert expected in text
    statistics = json.loads((tmp_path / "global_statistics" / "global_statistics.json").read_text())
    assert set(statistics["types"]) == {"bf16", "hifp8"}
    total = statistics["types"]["hifp8"]["total"]
    assert total["count"] == int(wide_study.of_type("hifp8")["count"].sum())
    plain = (tmp_path / "global_statistics" / "global_statistics.txt").read_text()
    assert str(total["count"]) in plain
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "global_statistics.json",
        "global_statistics.txt",
        "tensor_stats.txt",
    ]


def test_a_capture_of_statistics_alone_has_no_files_and_says_what_it_does_not_show(study_of, tmp_path):
    study = study_of(write_capture(tmp_path / "capture", mode="statistics"))
    write_texts(study, tmp_path)
    rows = len(study.index)
    for path in ("tensor_stats.txt", "global_statistics/global_statistics.txt"):
        text = " ".join((tmp_path / path).read_text().split())
        assert "== Findings: nothing stands out in what could be looked at Of this capture statistics alone" in text
        assert "outlier channels." in text
    assert f"== MXFP8 E4M3: {rows} tensors, statistics alone" in (tmp_path / "tensor_stats.txt").read_text()


def test_files_are_counted_where_they_lie(small_study, tmp_path):
    write_texts(small_study, tmp_path)
    files = small_study.summary["file"].nunique()
    assert f"{len(small_study.index)} tensors in {files} files, " in (tmp_path / "tensor_stats.txt").read_text()
