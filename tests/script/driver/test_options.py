import pytest

from script.driver.options import COLLECTION, DRAW, parse


def refused(capsys, program, *argv):
    with pytest.raises(SystemExit) as stop:
        parse(program, argv)
    output = capsys.readouterr()
    assert stop.value.code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def test_defaults(tmp_path):
    options = parse(COLLECTION, [])
    assert (options.mode, options.quant_type, options.default_type) == ("single", None, "mxfp8")
    assert (options.control_iter, options.collect_micro_batches, options.nproc) == (1, 1, 1)
    assert (options.dtype, options.stall_timeout, options.max_workers) == ("bf16", 300.0, None)
    assert options.tensor_dir == tmp_path / "enhanced_tensor_logs"
    assert parse(DRAW, []).mode == "visualize"
    assert parse(DRAW, []).output_dir == tmp_path / "draw"


@pytest.mark.parametrize(
    "argv",
    [
        ["quick", "hifp8", "--control-iter", "3"],
        ["--mode", "quick", "--quant-type", "hifp8", "--control-iter", "3"],
        ["quick", "--control-iter", "3", "hifp8"],
        ["quick", "--quant-type", "hifp8", "--mode", "quick", "--control-iter=3"],
    ],
)
def test_words_and_flags_say_the_same(argv):
    options = parse(COLLECTION, argv)
    assert (options.mode, options.quant_type, options.control_iter) == ("quick", "hifp8", 3)


@pytest.mark.parametrize("flag", ["--tensor-path", "--tensor-dir"])
@pytest.mark.parametrize("program", [COLLECTION, DRAW])
def test_two_names_of_the_tensor_directory(program, flag, tmp_path):
    assert parse(program, [flag, "here"]).tensor_dir == tmp_path / "here"


def test_environment_stands_behind_what_is_set_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_DIR", "by_environment")
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    options = parse(COLLECTION, [])
    assert (options.tensor_dir, options.default_type) == (tmp_path / "by_environment", "mxfp4")
    by_hand = parse(COLLECTION, ["single", "hifp8", "--tensor-dir", "by_hand"])
    assert (by_hand.tensor_dir, by_hand.quant_type) == (tmp_path / "by_hand", "hifp8")


def test_what_follows_the_dashes_goes_to_the_trainer():
    options = parse(COLLECTION, ["quick", "--", "--lr", "1e-3", "--", "single"])
    assert options.mode == "quick"
    assert options.passed_on == ("--lr", "1e-3", "--", "single")


@pytest.mark.parametrize(
    ("argv", "named", "allowed"),
    [
        (["both"], "'both'", "single, batch, quick"),
        (["--mode", "fast"], "'fast'", "single, batch, quick"),
        (["single", "mxfp9"], "'mxfp9'", "mxfp8"),
        (["--quant-type", "int3"], "'int3'", "hifp8"),
        (["--control-iter", "-1"], "'-1'", ">= 0"),
        (["--control-iter", "two"], "'two'", ">= 0"),
        (["--collect-micro-batches", "0"], "'0'", ">= 1"),
        (["--dtype", "fp8"], "fp8 is TransformerEngine's", "bf16, fp16, fp32"),
        (["--dtype", "int8"], "'int8'", "bf16, fp16, fp32"),
        (["--nproc", "0"], "'0'", ">= 1"),
        (["--stall-timeout", "nan"], "'nan'", "> 0"),
        (["--checkpoint-path", "nowhere"], "'nowhere'", "existing"),
        (["--tokenizer-path", "nowhere"], "'nowhere'", "existing"),
        (["single", "mxfp8", "more"], "'more'", "[TYPE]"),
        (["--modus", "single"], "--modus", ""),
        (["single", "mxfp8", "--quant-type", "mxfp4"], "mxfp8 and mxfp4", ""),
        (["--tensor-dir", "a", "--tensor-path", "b"], "/a and ", ""),
    ],
)
def test_wrong_usage_is_one_line(capsys, argv, named, allowed):
    line = refused(capsys, COLLECTION, *argv)
    assert line.startswith("run_tensor_collection.sh: error: ")
    assert named in line
    assert allowed in line


def test_a_bad_type_in_the_environment_is_named(capsys, monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "fp1")
    assert "environment CUSTOM_QUANT_TYPE: unknown quantisation type 'fp1'" in refused(capsys, COLLECTION)
