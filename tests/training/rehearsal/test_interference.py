"""--tensor-check-interference: a capture that changes nothing passes, one that changes one ulp is caught and named."""

import re

import pytest
import torch

from megatron.quantscope.capture import CaptureSession, open_capture
from megatron.training import main as command_line
from megatron.training import steps, training

SMALL = {"global_batch_size": 2, "attention_dropout": 0.1, "hidden_dropout": 0.1, "eval_iters": 0}
NOTHING = re.compile(r"capture changed nothing: (\d+) steps, (\d+) gradient buffers bit for bit, and (\d+) parameters")
CAN_NOT_TELL = "pretrain_gpt.py: error: can not tell whether capture changes the training: "


@pytest.fixture
def check(command, tmp_path, capsys):
    """`check(**flags)` -> (exit code, stdout, stderr) of a check in this process; the capture goes to tmp_path."""

    def run(**flags):
        flags = SMALL | {"tensor_check_interference": True, "tensor_save_dir": tmp_path / "capture"} | flags
        code = command_line.main(command(**flags))
        return code, *capsys.readouterr()

    return run


def interfere(monkeypatch, iteration, name):
    """From now on, keeping the tensors called `name` of an iteration moves one element of each by one ulp."""
    keep = CaptureSession.keep

    def keep_and_change(self, tensor, shown):
        keep(self, tensor, shown)
        if (self.moment.iteration, shown.tensor_name) == (iteration, name):
            element = tensor.detach().view(-1)[:1]
            element.copy_(torch.nextafter(element, torch.full_like(element, torch.inf)))

    monkeypatch.setattr(CaptureSession, "keep", keep_and_change)


@pytest.mark.parametrize(
    ("flags", "copies"),
    [
        ({"quant_type": "none"}, 1),
        ({"quant_type": "mxfp8", "bf16": True, "collect_micro_batches": 2}, 2),
        ({"quant_type": "mxfp8", "fp16": True, "initial_loss_scale": 2**16}, 2),
        ({"quant_type": "none", "bf16": True, "tensor_save_mode": "statistics"}, 2),
        ({"quant_type": "mxfp8", "tensor_save_mode": "both", "tensor_save_format": "segment"}, 1),
    ],
    ids=["fp32", "bf16", "fp16", "statistics", "both in segments"],
)
def test_capture_changes_nothing(check, tmp_path, flags, copies):
    """Dropout on: the random state must be put back too, or the two plain passes would differ."""
    code, out, err = check(**flags)
    assert (code, err) == (0, "")
    said = NOTHING.search(out)
    count, gradients, parameters = map(int, said.groups())
    assert (count, parameters) == (2, copies * gradients)
    assert len(re.findall(r"^[12] .* equal +equal$", out, re.MULTILINE)) == 2
    capture = open_capture(tmp_path / "capture")
    assert not capture.problems
    assert {record.iteration for record in capture.records} == {0}


def test_steps_are_those_that_are_collected(check, tmp_path):
    code, out, _ = check(quant_type="none", control_iter=3, tensor_schedule="2:5", save=tmp_path / "checkpoints")
    assert code == 0
    assert NOTHING.search(out).group(1) == "3"
    assert {record.iteration for record in open_capture(tmp_path / "capture").records} == {0, 1, 2}
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("iteration", "name", "first"),
    [
        (0, "output", r"step 1, (loss|gradient of \S+) on rank 0"),
        (1, "output", r"step 2, (loss|gradient of \S+) on rank 0"),
        (1, "grad_weight", r"step 2, gradient of decoder\.layers\.\d\.\S+ on rank 0"),
    ],
)
def test_one_ulp_is_caught_where_it_happens(check, monkeypatch, iteration, name, first):
    interfere(monkeypatch, iteration, name)
    code, out, err = check(quant_type="mxfp8", control_iter=2)
    assert code == 1
    assert re.fullmatch(f"pretrain_gpt.py: error: capture changed the training, first in {first}\n", err)
    equal = re.findall(r"^(\d) .* equal +equal$", out, re.MULTILINE)
    assert equal == [str(step + 1) for step in range(iteration)]
    assert re.search(rf"^{iteration + 1} .*\d+ of 28 differ", out, re.MULTILINE)


def test_a_parameter_that_capture_changes_is_named(check, monkeypatch):
    """The gradients of the step are right, and the parameters after it are not."""
    end_iteration = CaptureSession.end_iteration

    def change_and_end(self, scalars):
        next(iter(weights)).data[3, 7] += 1e-3
        end_iteration(self, scalars)

    def connect(args, model, optimizer):
        weights.append(model[0].module.decoder.layers[1].mlp.linear_fc2.weight)
        steps.connect(args, model, optimizer)

    weights = []
    monkeypatch.setattr(CaptureSession, "end_iteration", change_and_end)
    monkeypatch.setattr(training, "connect", connect)
    code, out, err = check(quant_type="none")
    assert code == 1
    assert "first in step 1, parameter of decoder.layers.1.mlp.linear_fc2.weight on rank 0" in err
    assert re.search(r"^1 .* equal +1 of 28 differ$", out, re.MULTILINE)


def test_a_model_that_does_not_repeat_itself_can_not_be_judged(check, monkeypatch, tmp_path):
    """Noise of a generator that no snapshot knows of."""
    generator = torch.Generator().manual_seed(1)
    summed_loss = steps.summed_loss

    def noisy(loss_mask, losses, **options):
        return summed_loss(loss_mask, losses + 1e-3 * torch.rand(losses.shape, generator=generator), **options)

    monkeypatch.setattr(steps, "summed_loss", noisy)
    code, out, err = check(quant_type="none")
    assert code == 1
    assert err.startswith(f"{CAN_NOT_TELL}two passes without capture differ already, first in step 1, loss on rank 0")
    assert "changed nothing" not in out
    assert not (tmp_path / "capture").exists()


def test_nothing_is_proved_by_a_capture_that_kept_nothing(check):
    code, _, err = check(quant_type="none", tensor_filter="tensors=attention_probs")
    assert (code, err) == (1, f"{CAN_NOT_TELL}nothing was captured; look at --tensor-filter\n")


def test_nothing_is_proved_by_a_capture_that_ended_early(check):
    code, _, err = check(quant_type="none", tensor_budget_gb=1e-4)
    assert code == 1
    assert f"{CAN_NOT_TELL}collecting ended early on rank 0: the budget of" in err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"tensor_dry_run": True}, "--tensor-dry-run and --tensor-check-interference exclude each other"),
        ({"train_iters": 1}, "--tensor-check-interference needs 2 iterations, and training has 1 left"),
        ({"skip_train": True}, "--tensor-check-interference needs training steps, and --skip-train leaves none"),
    ],
)
def test_wrong_usage_is_one_line(check, flags, line, tmp_path):
    code, _, err = check(quant_type="none", **flags)
    assert (code, err.count("\n")) == (2, 1)
    assert line in err
    assert not (tmp_path / "capture").exists()
