import json
from pathlib import Path

import pytest

from script.driver import collection, draw

FAKE_VISUALIZER = "import json, sys; json.dump(sys.argv[1:], open('drawn', 'w')); sys.exit({exit_code})"


@pytest.fixture
def fake_visualizer(tmp_path, monkeypatch):
    """Puts a program in place of the visualiser; gives a function that tells what it was called with."""
    path = tmp_path / "visualizer.py"
    monkeypatch.setattr(draw, "VISUALIZER", path)

    def called_with(exit_code=None):
        if exit_code is not None:
            path.write_text(FAKE_VISUALIZER.format(exit_code=exit_code))
        drawn = Path("drawn")
        return json.loads(drawn.read_text()) if drawn.exists() else None

    called_with(0)
    return called_with


def test_visualize_is_the_default(fake_visualizer, tmp_path):
    (tmp_path / "enhanced_tensor_logs").mkdir()
    assert draw.main([]) == 0
    here = [str(tmp_path / "enhanced_tensor_logs"), "--output_dir", str(tmp_path / "draw")]
    assert fake_visualizer() == ["--tensor_dir", *here]


def test_visualize_one_type_elsewhere(fake_visualizer, tmp_path):
    (tmp_path / "logs" / "mxfp4").mkdir(parents=True)
    argv = ["visualize", "mxfp4", "--tensor-path", "logs", "--output-dir", "out", "--max-workers", "3"]
    assert draw.main(argv) == 0
    there = [str(tmp_path / "logs" / "mxfp4"), "--output_dir", str(tmp_path / "out"), "--max_workers", "3"]
    assert fake_visualizer() == ["--tensor_dir", *there]


def test_visualize_passes_on_what_follows_two_hyphens(fake_visualizer, tmp_path):
    (tmp_path / "logs").mkdir()
    assert draw.main(["visualize", "--tensor-dir", "logs", "--", "--only", "heatmaps", "--layer", "0-3"]) == 0
    assert fake_visualizer()[-4:] == ["--only", "heatmaps", "--layer", "0-3"]


def test_the_exit_code_is_the_visualisers(fake_visualizer, tmp_path):
    (tmp_path / "enhanced_tensor_logs").mkdir()
    fake_visualizer(exit_code=1)
    assert draw.main(["visualize"]) == 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["visualize", "--tensor-dir", "nowhere"], "nowhere does not exist"),
        (["visualize", "hifp8", "--tensor-dir", "logs"], "has no hifp8; there: bf16, mxfp4"),
        (["both", "--data-path", "nowhere"], "is no data"),
        (["both", "--", "--tensor-dry-run"], "both draws what it collects, and --tensor-dry-run collects nothing"),
    ],
)
def test_wrong_usage(capsys, fake_visualizer, tmp_path, argv, line):
    for name in ("mxfp4", "bf16"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert draw.main(argv) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert fake_visualizer() is None


@pytest.fixture
def small_inputs(monkeypatch, fake_trainer):
    monkeypatch.setattr(collection, "prepare", lambda *_: collection.trainer.QUICK_INPUTS)
    return fake_trainer


def test_both_collects_then_draws(capsys, fake_visualizer, small_inputs, tmp_path):
    small_inputs("good")
    assert draw.main(["--mode", "both", "--quant-type", "hifp8"]) == 0
    assert "hifp8" in capsys.readouterr().out
    assert fake_visualizer()[1] == str(tmp_path / "enhanced_tensor_logs")


def test_both_takes_mxfp8_unless_told(capsys, fake_visualizer, small_inputs, tmp_path):
    small_inputs("good")
    assert draw.main(["both"]) == 0
    assert (tmp_path / "enhanced_tensor_logs" / "mxfp8").is_dir()


def test_collect_does_not_draw(fake_visualizer, small_inputs):
    small_inputs("good")
    assert draw.main(["collect", "mxfp4"]) == 0
    assert fake_visualizer() is None


def test_what_could_not_be_collected_is_not_drawn(fake_visualizer, small_inputs):
    small_inputs("crash")
    assert draw.main(["both"]) == 1
    assert fake_visualizer() is None
