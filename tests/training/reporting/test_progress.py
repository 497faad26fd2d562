"""Log lines, letter by letter in Megatron-LM's form, and TensorBoard's scalars."""

import re
import sys
from types import SimpleNamespace

import pytest

from megatron.training.failure import UsageError
from megatron.training.reporting.progress import ProgressLog, Report, log_line, open_tensorboard, scalars

TIME = r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"
REPORT = {
    "iteration": 10,
    "consumed_samples": 40,
    "seconds": 0.0125,
    "learning_rate": 3e-4,
    "global_batch_size": 4,
    "loss": 10.5,
    "loss_scale": 1.0,
    "grad_norm": 2.34567,
    "zeros": None,
    "skipped": False,
}


def report(**changes):
    return Report(**(REPORT | changes))


@pytest.fixture
def args(parse):
    args = parse(train_iters=100, log_interval=2)
    args.padded_vocab_size = 128  # the tokenizer's part
    return args


def without_time(line):
    assert re.match(TIME + " iteration", line)
    return re.sub("^" + TIME, "", line)


def test_line_is_megatrons(args):
    assert without_time(log_line(args, [report()])) == (
        " iteration       10/     100 | consumed samples:           40 | elapsed time per iteration (ms): 12.5 | "
        "learning rate: 3.000000E-04 | global batch size:     4 | lm loss: 1.050000E+01 | loss scale: 1.0 | "
        "grad norm: 2.346 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_line_with_everything(parse):
    args = parse(train_iters=100, log_throughput=True, vocab_size=128)
    args.padded_vocab_size = 128
    # 2 layers: q, k, v, projection 4 x 64 x 64, MLP 2 x 64 x 256; head 64 x 128; scores and context 2 x 32 x 64 a token
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 128
    per_token = 6 * (weights + 2 * 2 * 32 * 64)
    rate = per_token * 4 * 32 / 1e-6 / 1e12
    line = without_time(log_line(args, [report(seconds=1e-6, zeros=17.0)]))
    assert f"(ms): 0.0 | throughput per GPU (TFLOP/s/GPU): {rate:.1f} | learning rate" in line
    assert "grad norm: 2.346 | num zeros: 17 | number of skipped" in line


def test_line_over_several_iterations(args):
    reports = [
        report(loss=8.0, seconds=0.1, iteration=8),
        report(loss=float("nan"), seconds=0.2, iteration=9),
        report(loss=99.0, seconds=0.3, iteration=10, skipped=True),
        report(loss=6.0, seconds=0.4, iteration=11, grad_norm=None),
    ]
    line = without_time(log_line(args, reports))
    assert line.startswith(" iteration       11/     100 | ")
    assert "elapsed time per iteration (ms): 250.0 | " in line
    assert "lm loss: 7.000000E+00 | " in line
    assert "grad norm" not in line
    assert line.endswith("number of skipped iterations:   1 | number of nan iterations:   1 |")


def test_the_routers_losses_are_means_as_the_loss_beside_them(args):
    reports = [
        report(loss=8.0, router_losses={"z_loss": 2.0}),
        report(loss=99.0, router_losses={"z_loss": 50.0}, skipped=True),
        report(loss=6.0, router_losses={"z_loss": 5.0}),
    ]
    assert "lm loss: 7.000000E+00 | z_loss: 3.500000E+00 | loss scale" in log_line(args, reports)


@pytest.mark.parametrize("loss", [11.0, 0.25, 1e-9, 123456.0, float("nan"), float("inf")])
def test_the_drivers_read_the_loss(args, loss):
    found = re.findall(r"lm loss: (\S+)", log_line(args, [report(loss=loss)]))
    assert [float(value) for value in found] == [pytest.approx(loss, rel=1e-6, nan_ok=True)]


@pytest.mark.usefixtures("one_rank")
class TestLog:
    def test_a_line_every_interval_and_for_the_last(self, args, capsys):
        log = ProgressLog(args)
        printed = []
        for iteration in range(1, 6):
            log.add(report(iteration=iteration, loss=float(iteration)), last=iteration == 5)
            printed.append([float(loss) for loss in re.findall(r"lm loss: (\S+)", capsys.readouterr().out)])
        assert printed == [[], [1.5], [], [3.5], [5.0]]

    def test_evaluation(self, args, capsys):
        ProgressLog(args).add_evaluation("validation", 4, 2.0)
        frame, line, again = capsys.readouterr().out.splitlines()
        assert line == (" validation loss at iteration 4 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | ")
        assert frame == again == "-" * len(line)

    def test_perplexity_has_a_bound(self, args, capsys):
        ProgressLog(args).add_evaluation("test", 4, 1000.0)
        assert "lm loss PPL: 4.851652E+08" in capsys.readouterr().out  # e^20

    def test_tensorboard_gets_the_same_numbers(self, args):
        written = []
        log = ProgressLog(args)
        log._writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
        log.add(report(), last=False)
        assert ("lm loss", 10.5, 10) in written
        assert ("lm loss vs samples", 10.5, 40) in written
        assert ("learning-rate", 3e-4, 10) in written
        assert {name for name, _, _ in written} == {
            "lm loss",
            "lm loss vs samples",
            "learning-rate",
            "batch-size",
            "loss-scale",
            "grad-norm",
            "iteration-time",
            "throughput",
        }


def test_scalars_leave_out_what_was_not_measured(args):
    assert {"grad-norm", "num-zeros"} & set(scalars(args, report(grad_norm=None))) == set()
    assert scalars(args, report(zeros=3))["num-zeros"] == 3.0


def test_tensorboard_writes_where_it_may(parse, tmp_path):
    pytest.importorskip("tensorboard")
    writer = open_tensorboard(parse(tensorboard_dir=tmp_path / "board"))
    writer.add_scalar("lm loss", 1.0, 1)
    writer.close()
    assert [path for path in (tmp_path / "board").iterdir() if path.stat().st_size]


def test_tensorboard_where_it_may_not(parse, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--tensorboard-dir: .*file/board can not be written: "):
        open_tensorboard(parse(tensorboard_dir=tmp_path / "file" / "board"))


def test_tensorboard_is_missing(parse, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="--tensorboard-dir needs the package tensorboard"):
        open_tensorboard(parse(tensorboard_dir=tmp_path))
