"""--tensor-dry-run: what it prints is what a run of the same flags then writes, to the row and to the byte."""

import json
import re
from collections import namedtuple

import pytest

from megatron.quantscope.capture import CaptureConfig, CaptureSession, Schedule, TensorFilter
from megatron.training import main as command_line
from megatron.training.rehearsal import dry_run as module
from megatron.training.rehearsal.dry_run import Measured, limits, planned_iterations, size, table

SMALL = {"global_batch_size": 2, "eval_iters": 0}
LINE = re.compile(r"^an iteration +(\S+) +(\S+) +(\S+) ", re.MULTILINE)
Counts = namedtuple("Counts", "rows files bytes")


@pytest.fixture
def train(command, tmp_path, capsys):
    """`train(**flags)` -> (exit code, stdout, stderr) of a run in this process; a capture goes to tmp_path."""

    def run(**flags):
        flags = SMALL | {"tensor_save_dir": tmp_path / "capture"} | flags
        code = command_line.main(command(**flags))
        return code, *capsys.readouterr()

    return run


def printed(out):
    return Counts(*(int(number.replace(",", "")) for number in LINE.search(out).groups()))


def written(directory):
    """Rows, files and bytes of a capture of one iteration: of the commit records, and of the files on the disk."""
    lines = [json.loads(line) for path in directory.glob("*/runs/*/manifest_*.jsonl") for line in path.open()]
    commits = [line for line in lines if line["kind"] == "commit"]
    files = [*directory.glob("*/*.pt"), *directory.glob("*/runs/*/*.safetensors")]
    recorded = Counts(*(sum(commit[name] for commit in commits) for name in Counts._fields))
    on_disk = Counts(
        sum(line["kind"] == "tensor" for line in lines), len(files), sum(path.stat().st_size for path in files)
    )
    return recorded, on_disk


@pytest.mark.parametrize(
    "flags",
    [
        {"quant_type": "none"},
        {"quant_type": "mxfp8", "bf16": True, "collect_micro_batches": 2},
        {"quant_type": "mxfp8", "bf16": True, "tensor_save_format": "segment", "collect_micro_batches": 2},
        {"quant_type": "none", "tensor_save_mode": "statistics"},
        {"quant_type": "mxfp8", "tensor_save_mode": "both"},
        {"quant_type": "mxfp8", "tensor_save_mode": "both", "tensor_save_format": "segment"},
        {"quant_type": "none", "tensor_filter": ["layers=1", "tensors=grad_*"], "attention_dropout": 0.1},
        {"quant_type": "none", "tensor_schedule": "11:3", "train_iters": 12},
    ],
    ids=lambda flags: " ".join(map(str, flags.values())),
)
def test_what_is_printed_is_what_is_written(train, tmp_path, flags):
    code, out, err = train(tensor_dry_run=True, **flags)
    assert (code, err) == (0, "")
    assert not (tmp_path / "capture").exists()
    assert train(save_tensors=True, **flags)[0] == 0
    recorded, on_disk = written(tmp_path / "capture")
    assert printed(out) == recorded == on_disk
    assert recorded.rows > 0


def test_the_first_collected_iteration_is_the_one_that_is_run(train, monkeypatch):
    """Its number, its samples, and its micro-batches, of a batch that has grown till then."""
    shown = []
    begin_micro_batch = CaptureSession.begin_micro_batch

    def begin_and_note(self, *args, **options):
        begin_micro_batch(self, *args, **options)
        shown.append(self.moment)

    monkeypatch.setattr(CaptureSession, "begin_micro_batch", begin_and_note)
    growing = {"train_iters": None, "train_samples": 12, "rampup_batch_size": [1, 1, 2], "collect_micro_batches": 9}
    flags = growing | {"tensor_schedule": "3", "global_batch_size": 3}
    code, out, _ = train(tensor_dry_run=True, **flags)
    assert code == 0
    rehearsed = shown.copy()
    shown.clear()
    assert train(save_tensors=True, **flags)[0] == 0
    assert rehearsed == [moment for moment in shown if moment is not None]
    assert len(rehearsed) > 1
    assert f"dry run of iteration 3: {len(rehearsed)} of {len(rehearsed)} micro-batches" in out


def test_nothing_appears_on_the_disk(train, tmp_path):
    """No checkpoint and no TensorBoard either; what is there already is left as it is."""
    (tmp_path / "capture" / "fp32").mkdir(parents=True)
    code, out, _ = train(
        quant_type="none",
        tensor_dry_run=True,
        save_tensors=True,
        save=tmp_path / "save",
        tensorboard_dir=tmp_path / "b",
    )
    assert code == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["capture", "fp32"]
    assert "kept" not in out
    assert "iteration        1" not in out  # not trained


def test_what_the_budget_has_no_room_for_is_counted_too(train):
    code, out, err = train(tensor_dry_run=True, tensor_budget_gb=1e-5, control_iter=2, tensor_on_error="stop")
    assert (code, err) == (0, "")
    assert printed(out).bytes > 1e4
    assert "--tensor-budget-gb: 10 kB, NOT ENOUGH for 2: 0 iterations fit" in out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"tensor_check_interference": True}, "--tensor-dry-run and --tensor-check-interference exclude each other"),
        (
            {"tensor_schedule": "4"},
            "nothing would be captured: --tensor-schedule starts at step 4, training has 4",
        ),
        ({"skip_train": True}, "--tensor-dry-run needs training steps, and --skip-train leaves none"),
    ],
)
def test_wrong_usage_is_one_line(train, flags, line):
    code, _, err = train(tensor_dry_run=True, **flags)
    assert (code, err.count("\n")) == (2, 1)
    assert line in err


@pytest.mark.parametrize(
    ("schedule", "control_iter", "left", "expected"),
    [("", 1, 10, 1), ("", 0, 10, 10), ("2:3", 0, 10, 3), ("2:3:8", 0, 10, 2), ("2:3", 2, 10, 2), ("", 20, 10, 10)],
)
def test_planned_iterations(schedule, control_iter, left, expected):
    """As the schedule itself says, step by step."""
    parsed = Schedule.parse(schedule)
    collected = [step for step in range(left) if parsed.collects(step)]
    assert len(collected[: control_iter or None]) == expected
    assert planned_iterations(parsed, control_iter, left) == expected


RANKS = [Measured(rows=3, files=2, bytes=1000), Measured(rows=3, files=3, bytes=3000)]


def test_table_adds_the_ranks_and_multiplies_the_iterations():
    assert table(RANKS, 5)[1:] == [
        ("an iteration", "6", "5", "4,000", "4 kB"),
        ("rank 1 has most", "3", "3", "3,000", "75.0% of it"),
        ("5 iterations, about", "30", "25", "20,000", "20 kB; later ones differ by the digits of their coordinates"),
    ]
    assert len(table(RANKS[:1], 1)) == 2


@pytest.mark.parametrize(("keeps", "fit"), [("", 2), ("ranks=1", 5)])
def test_the_budget_is_shared_by_the_ranks_that_keep_anything(tmp_path, monkeypatch, keeps, fit):
    """Half of it each, or all of it for one: the rank of 3,000 bytes spends it first."""
    usage = module.shutil.disk_usage(tmp_path)._replace(free=3 * (4000 + 6 * module.MANIFEST_ROW_BYTES) - 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    config = CaptureConfig(directory=tmp_path / "not" / "there", filter=TensorFilter.parse(keeps.split()))
    budget, disk = limits(RANKS, 3, config, budget=15_999)
    assert budget == "--tensor-budget-gb: 16 kB, " + ("NOT ENOUGH for 3: " if fit < 3 else "") + f"{fit} iterations fit"
    assert disk.startswith(f"free in {tmp_path}: 48 kB, NOT ENOUGH for 3: 2 iterations fit (with about 12 kB of")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (5e15, "5e+03 TB")],
)
def test_size(count, text):
    assert size(count) == text
