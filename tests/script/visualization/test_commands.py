"""The sub-commands, in this process: what they print, write and answer."""

import argparse
import os
import signal

import numpy as np
import pandas
import pytest
import torch

from megatron.quantscope.analysis.selection import FILTERS
from megatron.quantscope.formats import FORMATS, fake_quantize
from megatron.quantscope.report import render
from megatron.quantscope.report.commands import error_table, parser
from megatron.quantscope.report.commands.parser import COMMANDS, DRAW
from script.visualization import tensor_visualizer
from tests.quantscope.analysis.captures import save, write_capture

ROWS, FILES = 36, 32  # of one layer


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    return write_capture(tmp_path_factory.mktemp("capture"), layers=2)


@pytest.fixture
def run(capsys):
    """Run a command; gives exit code, stdout and stderr."""

    def call(*words):
        code = tensor_visualizer.main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_help_names_every_command_and_every_command_has_help(capsys):
    for words in ([], *([command.name] for command in COMMANDS)):
        with pytest.raises(SystemExit) as exit:
            parser.parse([*words, "--help"])
        assert exit.value.code == 0
        text = capsys.readouterr().out
        assert all(command.name in text for command in COMMANDS) or words


def test_filters_are_spelt_alike_everywhere():
    for command in (DRAW, *COMMANDS):
        if command.filters:
            words = parser._parser(command).format_help()
            assert all(f"{each.option} " in words for each in FILTERS), command.name


def test_tables_that_the_parser_repeats_to_stay_light_agree():
    assert parser.SUFFIXES == render.SUFFIXES
    assert tuple(error_table.FIGURES) == parser.METRICS


def test_list_has_a_line_a_row_and_a_sum(capture, run):
    code, out, err = run("list", capture, "--layer", 1, "--tensor", "fc2.x,dy")
    lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 1 + 5 + 1)
    assert lines[0].split()[:3] == ["type", "iteration", "micro-batch"]
    assert sorted(line.split()[5] for line in lines[1:-1]) == ["fc1.dy", "fc2.dy", "fc2.x", "proj.dy", "qkv.dy"]
    assert lines[-1].startswith("5 rows, 5 tensors of ")


def test_list_as_csv_has_every_field(capture, run, tmp_path):
    code, out, _ = run("list", capture, "--csv")
    (tmp_path / "list.csv").write_text(out)
    frame = pandas.read_csv(tmp_path / "list.csv")
    assert (code, len(frame)) == (0, 2 * ROWS)
    assert {"module", "shape", "checksum", "amax"} <= set(frame)


def test_show_tells_the_truth_about_one_file(capture, run):
    path = next(iter(sorted((capture / "mxfp8").glob("*L1_forward_pre_linear*input.pt"))))
    x = torch.load(path, weights_only=True)["tensor"]
    code, out, _ = run("show", path, "--formats", "mxfp4")
    line = next(line for line in out.splitlines() if line.startswith("fprop  mxfp4   "))
    assert code == 0
    assert f"{x.numel():,}" in out
    amax = next(line for line in out.splitlines() if line.startswith("  amax"))
    assert amax.split()[1] == f"{x.abs().max().item():.4g}"
    q = fake_quantize(x, FORMATS["mxfp4"]).double().numpy()
    x = x.double().numpy()
    expected = 10 * np.log10(np.square(x).sum() / np.square(x - q).sum())
    assert line.split()[2] == f"{expected:.1f}"


def test_show_of_a_directory_stops_after_twenty(capture, run):
    code, out, _ = run("show", capture, "--formats", "mxfp8", "--tensor", "dy,dx,dw")
    assert code == 0
    assert out.count("largest channels") == 20
    assert out.splitlines()[-1].startswith(f"{2 * 4 * 3 - 20} more match")


def test_show_of_a_file_that_no_manifest_names(tmp_path, run):
    x = torch.linspace(-1, 1, 64).reshape(2, 32)
    path = save(tmp_path / "20241201_143022_0001_linear_L3_forward_mxfp8_input.pt", x, rank=5)
    code, out, _ = run("show", path)
    assert code == 0
    assert "rank 5" in out
    assert "64, zero 0" in out


def test_show_of_a_damaged_file_is_one_line_and_1(tmp_path, run):
    directory = write_capture(tmp_path, layers=1)
    path = min((directory / "mxfp8").glob("*.pt"))
    path.write_bytes(path.read_bytes()[:300])
    code, out, err = run("show", path)
    assert (code, out.strip()) == (1, "")
    assert path.name in err


def test_verify_is_that_of_the_capture(capture, run):
    code, out, _ = run("verify", capture)
    assert (code, out.splitlines()[-1].endswith("no findings")) == (0, True)


def test_compare_prints_where_runs_part(tmp_path, run):
    for quant_type, seed in (("bf16", 0), ("mxfp8", 1)):
        write_capture(tmp_path / quant_type, quant_type, layers=1, seed=seed)
    code, out, err = run("compare", tmp_path / "bf16", tmp_path / "mxfp8", "--max_workers", 1)
    assert (code, err) == (0, "")
    assert out.startswith("Comparison of mxfp8 with bf16: ")
    assert "the first is qkv.x of layer 0" in out


def test_compare_writes_table_text_and_figures(tmp_path, run):
    for quant_type, seed in (("bf16", 0), ("mxfp8", 1)):
        write_capture(tmp_path / "in", quant_type, layers=1, seed=seed)
    out_dir = tmp_path / "out"
    code, out, _ = run("compare", tmp_path / "in", "--output_dir", out_dir, "--max_workers", 1)
    assert (code, out.strip()) == (0, str(out_dir / "comparison.txt"))
    table = pandas.read_parquet(out_dir / "comparison.parquet")
    weights = table["tensor_name"] == "weight"
    assert table.loc[weights, "equal"].all()
    assert not table.loc[~weights, "equal"].any()
    assert (out_dir / "comparisons" / "divergence.png").is_file()


def two_runs(directory):
    for quant_type, seed in (("bf16", 0), ("mxfp8", 1)):
        write_capture(directory, quant_type, layers=1, seed=seed)
    return directory


def test_compare_into_a_file_is_one_line(tmp_path, run):
    (tmp_path / "out").write_text("what was there")
    code, out, err = run("compare", two_runs(tmp_path / "in"), "--output_dir", tmp_path / "out", "--max_workers", 1)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"can not write {tmp_path / 'out'}: File exists" in err
    assert (tmp_path / "out").read_text() == "what was there"


def test_compare_without_a_scheduler_is_one_line(tmp_path, run, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("megatron.quantscope.analysis.dask_workers.CONNECT_SECONDS", 0.3)
    code, out, err = run("compare", two_runs(tmp_path), "--dask-scheduler", "tcp://127.0.0.1:9")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in err


def test_compare_whose_worker_is_killed_is_one_line(tmp_path, run, monkeypatch):
    def killed(pairing, workers, **more):
        list(workers.map(signal.raise_signal, [signal.SIGKILL]))

    monkeypatch.setattr("megatron.quantscope.analysis.comparison.compare_pairs", killed)
    code, out, err = run("compare", two_runs(tmp_path), "--max_workers", 2)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].endswith("a worker was killed, most likely for want of memory: try fewer than 2")
    assert "Traceback" not in err


def test_compare_whose_figures_fail_is_1_and_says_so(tmp_path, run, monkeypatch):
    def failing(study):
        raise ValueError("broken")

    monkeypatch.setattr("megatron.quantscope.report.runs.draw_divergence", failing)
    code, out, err = run("compare", two_runs(tmp_path / "in"), "--output_dir", tmp_path / "out", "--max_workers", 1)
    assert (code, out.strip()) == (1, str(tmp_path / "out" / "comparison.txt"))
    assert err.splitlines()[-1].endswith("1 figures could not be drawn")


def test_compare_wants_two_runs(capture, run):
    code, out, err = run("compare", capture)
    assert (code, out) == (2, "")
    assert "holds one run, mxfp8" in err


def test_what_if_prints_a_line_a_site_and_gemm(capture, run):
    code, out, _ = run("what-if", capture, "--formats", "mxfp8,hifp8", "--max_workers", 1, "--tensor", "fc2.*")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["quant_type", "site", "GEMM", "mxfp8", "mxfp8", "rceil", "hifp8", "hifp8", "scaled"]
    assert [line[1:3] for line in lines[1:4]] == [["fc2.x", "fprop"], ["fc2.x", "wgrad"], ["fc2.w", "fprop"]]


@pytest.mark.parametrize(("name", "read"), [("t.csv", pandas.read_csv), ("t.parquet", pandas.read_parquet)])
def test_what_if_writes_a_table(capture, run, tmp_path, name, read):
    words = ("--formats", "mxfp4", "--by", "tensor", "--max_workers", 1, "--layer", 0, "--tensor", "qkv.x")
    code, out, _ = run("what-if", capture, "--output", tmp_path / name, *words)
    assert (code, out.strip()) == (0, str(tmp_path / name))
    table = read(tmp_path / name)
    assert sorted(zip(table["gemm"], table["scale_rule"], strict=True)) == [
        (gemm, rule) for gemm in ("fprop", "wgrad") for rule in ("floor", "rceil")
    ]


def test_what_if_of_statistics_alone_is_one_line(tmp_path, run):
    directory = write_capture(tmp_path / "in", layers=1, mode="statistics")
    code, out, err = run("what-if", directory, "--max_workers", 1, "--output", tmp_path / "t.csv")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "only statistics of its tensors were kept" in err
    assert not (tmp_path / "t.csv").exists()


def test_what_if_of_integers_is_one_line(tmp_path, run):
    write_capture(tmp_path, layers=1, spoil=lambda module, layer, name, tensor: tensor.int())
    code, out, err = run("what-if", tmp_path, "--max_workers", 1)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "none of its tensors is of a floating-point dtype" in err


def test_list_shows_names_that_are_not_utf8(tmp_path, run):
    name = b"20241201_143022_0001_iter000_linear_L1_forward_pre_linear_bf16_rank0_sample0_in\xffput.pt"
    save(tmp_path / "plain.pt", torch.ones(2, 32)).rename(tmp_path / os.fsdecode(name))
    code, out, err = run("list", tmp_path)
    assert (code, err) == (0, "")
    assert r"in\udcffput.pt" in out
    code, out, err = run("what-if", tmp_path, "--max_workers", 1)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "its name is not UTF-8" in err


def test_what_if_refuses_other_kinds_of_files(capture, run, tmp_path):
    code, _, err = run("what-if", capture, "--output", tmp_path / "t.xlsx")
    assert (code, err.count("\n")) == (2, 1)
    assert ".csv or .parquet" in err


def test_report_writes_the_page_alone(capture, run, tmp_path):
    code, out, _ = run("report", capture, "--output_dir", tmp_path, "--formats", "mxfp8", "--max_workers", 1)
    assert (code, out.strip()) == (0, str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size > 1 << 20
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize("command", ["list", "show", "what-if"])
def test_filters_that_leave_nothing_are_said(capture, run, command):
    code, out, err = run(command, capture, "--layer", 77)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "matches --layer 77" in err


def test_unknown_formats_are_named(capsys):
    with pytest.raises(SystemExit):
        parser.parse(["what-if", "x", "--formats", "mxfp8,int3"])
    assert "unknown number format 'int3'" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError):
        parser.format_names("int3")


def test_show_of_a_row_without_a_tensor_says_its_statistics(tmp_path, run):
    directory = write_capture(tmp_path, layers=1, mode="statistics")
    code, out, _ = run("show", directory, "--tensor", "fc2.x")
    assert code == 0
    assert "rms " in out
    assert "mxfp8 rceil" not in out
