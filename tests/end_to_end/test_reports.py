"""What a run reports beside its losses: TensorBoard's view of the tensors, times, norms, traces, a progress file."""

import math
import re
from collections import defaultdict

import pytest

from megatron.quantscope.capture import open_capture
from megatron.quantscope.formats import FORMATS, measure_format, merge
from tests.end_to_end.conftest import MODEL_FLAGS
from tests.end_to_end.versions import same_weights

MICRO_BATCHES, STEPS, QUANT_TYPE = 2, 2, "mxfp4"
KEEP = (
    "--save-tensors", "--control-iter", STEPS, "--collect-micro-batches", MICRO_BATCHES, "--quant-type", QUANT_TYPE,
)  # fmt: skip
TENSOR_PARALLEL = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
OPERANDS = {  # looked at along the axis of the first GEMM
    "input": -1, "weight": -1, "grad_output": -1, "query": -1, "key": -1, "value": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(train, tmp_path_factory):
    """`reports(mode, *flags, ranks=1)` -> (run, capture, {rank: events}), one run a combination."""
    runs = {}

    def run(mode, *flags, ranks=1):
        if (mode, ranks) not in runs:
            directory = tmp_path_factory.mktemp("run")
            flags = (*flags, "--tensor-save-dir", directory / "capture", "--tensorboard-dir", directory / "board")
            done = train(*KEEP, "--tensor-save-mode", mode, *flags, ranks=ranks)
            capture = open_capture(directory / "capture")
            assert not capture.problems
            found = {rank: events(directory / "board" / f"rank{rank}") for rank in range(ranks)}
            runs[mode, ranks] = done, capture, found | {"run": events(directory / "board")}
        return runs[mode, ranks]

    return run


def events(directory):
    """Everything in a directory of event files, read by TensorBoard itself: tag -> {step: value or histogram}."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    tags = found.Tags()
    by_tag = {tag: {each.step: each.value for each in found.Scalars(tag)} for tag in tags["scalars"]}
    return by_tag | {
        tag: {each.step: each.histogram_value for each in found.Histograms(tag)} for tag in tags["histograms"]
    }


def statistics_by_tag(capture, rank):
    """(tag, step) -> statistics of all micro-batches, from the manifest."""
    rows = defaultdict(list)
    for record in capture.records:
        if record.rank == rank and (record.operation, record.tensor_name) != ("backward", "weight"):
            rows[f"tensors/{record.module}/{record.tensor_name}", record.iteration + 1].append(record)
    assert {len(records) for records in rows.values()} == {MICRO_BATCHES}
    return {key: (records, merge(*(record.statistics for record in records))) for key, records in rows.items()}


@pytest.mark.parametrize(
    ("mode", "flags", "ranks"),
    [("statistics", (), 1), ("both", (), 1), ("statistics", TENSOR_PARALLEL, 2)],
    ids=["statistics", "both", "TP 2"],
)
def test_amax_and_exponents_are_those_of_the_manifest(reports, mode, flags, ranks):
    _, capture, found = reports(mode, *flags, ranks=ranks)
    for rank in range(ranks):
        expected = statistics_by_tag(capture, rank)
        assert len(expected) > 100
        for (tag, step), (_, statistics) in expected.items():
            assert found[rank][f"{tag}/amax"][step] == pytest.approx(statistics.amax, rel=1e-6), tag
            assert binades(found[rank][f"{tag}/exponents"][step]) == dict(statistics.exponents), tag
        amax = {tag for tag in found[rank] if tag.startswith("tensors/") and tag.endswith("/amax")}
        assert amax == {f"{tag}/amax" for tag, _ in expected}


def binades(histogram):
    """Exponent -> elements, from the right edges of the buckets."""
    pairs = zip(histogram.bucket_limit, histogram.bucket, strict=True)
    return {round(limit) - 1: count for limit, count in pairs if count}


def test_underflow_and_sqnr_are_those_of_the_kept_tensors(reports):
    _, capture, found = reports("both")
    seen = set()
    for (tag, step), (records, statistics) in statistics_by_tag(capture, 0).items():
        name = records[0].tensor_name
        if name not in OPERANDS or (records[0].layer_type, name) == ("attention", "grad_output"):
            continue
        damages = [measure_format(capture.load(each), QUANT_TYPE, axis=OPERANDS[name]) for each in records]
        underflow = 100 * sum(each.underflow for each in damages) / (statistics.finite - statistics.zero)
        error = math.fsum(each.error_squares for each in damages)
        assert found[0][f"{tag}/underflow"][step] == pytest.approx(underflow, rel=1e-6), tag
        assert found[0][f"{tag}/sqnr"][step] == pytest.approx(10 * math.log10(statistics.sum_squares / error), rel=1e-4)
        seen.add((records[0].layer_type, name))
    assert len(seen) == 6
    assert FORMATS[QUANT_TYPE].block  # else the axis would not matter


def test_modes_show_the_same(reports):
    (_, _, few), (_, _, all_of_it) = reports("statistics"), reports("both")
    tensors = {tag for tag in few[0] if tag.startswith("tensors/")}
    assert len({tag for tag in tensors if tag.endswith("/sqnr")}) > 20
    assert {tag: few[0][tag] for tag in tensors} == {tag: all_of_it[0][tag] for tag in tensors}


def test_the_loss_stands_beside_them(reports):
    done, _, found = reports("statistics")
    losses = dict(enumerate(map(float, done.losses), start=1))
    assert found["run"]["lm loss"] == pytest.approx(losses, rel=1e-5)
    assert not any(tag.startswith("tensors/") for tag in found["run"])


def test_capturing_for_tensorboard_changes_no_loss(reports, train):
    (watched, _, _), plain = reports("statistics"), train("--quant-type", QUANT_TYPE, "--train-iters", 3)
    assert watched.losses == plain.losses[: len(watched.losses)]


def test_a_place_that_can_not_be_written_is_one_line(trainer, tmp_path):
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "rank0").touch()
    places = "--tensor-save-dir", tmp_path / "capture", "--tensorboard-dir", tmp_path / "board"
    codes, output = trainer.launch(*MODEL_FLAGS, *KEEP, "--tensor-save-mode", "statistics", *places)
    assert codes == [1]
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if "error" in line]
    assert f"--tensorboard-dir: {tmp_path / 'board' / 'rank0'} can not be written: File exists" in line


class TestFurtherReports:
    """One run of two ranks with everything that is reported by request."""

    @pytest.fixture(scope="class")
    def directory(self, tmp_path_factory):
        return tmp_path_factory.mktemp("reports")

    @pytest.fixture(scope="class")
    def run(self, train, directory):
        flags = "--timing-log-level 2 --log-timers-to-tensorboard --log-params-norm --log-memory-to-tensorboard "
        flags += "--log-world-size-to-tensorboard --no-log-loss-scale-to-tensorboard --log-progress --manual-gc "
        flags += "--check-weight-hash-across-dp-replicas-interval 1 --save-interval 2 --eval-iters 1 --eval-interval 2 "
        flags += "--use-pytorch-profiler --profile --profile-step-start 1 --profile-step-end 2 --profile-ranks 1 "
        flags += "--use-distributed-optimizer --bf16 --logging-level 20"
        places = "--save", directory / "save", "--tensorboard-dir", directory / "board"
        return train(*flags.split(), *places, ranks=2)

    def test_times_are_printed_at_every_log_line(self, run):
        parts = run.output.split("(min, max) time across ranks (ms):")
        assert len(parts) == 1 + 3
        for part in parts[1:]:
            found = re.findall(r"([\w-]+) \.+: \((\S+), (\S+)\)", part)
            times = {name: (float(low), float(high)) for name, low, high in found}
            assert {"forward-backward", "optimizer", "forward-compute", "backward-compute"} <= set(times)
            assert all(0 < low <= high for low, high in times.values())
            whole = times["forward-backward"][1]
            assert times["forward-compute"][0] + times["backward-compute"][0] <= whole

    def test_scalars_by_request(self, run, directory):
        found = events(directory / "board")
        assert set(found["forward-backward-time"]) == set(found["optimizer-time"]) == {1, 2, 3}
        assert set(found["world-size"].values()) == {2.0}
        assert all(value > 1e8 for value in found["mem-resident-bytes"].values())  # torch alone takes 100 MB
        assert "loss-scale" not in found
        assert {"lm loss validation", "lm loss validation ppl"} <= set(found)
        norms = [float(norm) for norm in re.findall(r"params norm: (\S+)", run.output)]
        assert list(found["params-norm"].values()) == pytest.approx(norms, abs=1e-3)

    @same_weights
    def test_the_norm_does_not_depend_on_the_layout(self, run, train):
        norms = re.findall(r"params norm: (\S+)", run.output)
        one = train("--bf16", "--log-params-norm")
        split = train("--bf16", "--log-params-norm", *TENSOR_PARALLEL, ranks=2)
        assert norms == re.findall(r"params norm: (\S+)", one.output) == re.findall(r"params norm: (\S+)", split.output)

    def test_only_the_profiled_rank_has_a_trace(self, run, directory):
        assert [path.name.split(".")[0] for path in (directory / "board").glob("*.pt.trace.json")] == ["rank1"]

    def test_progress_is_noted(self, run, directory):
        lines = (directory / "save" / "progress.txt").read_text().splitlines()
        noted = [line.split("\t")[3:] for line in lines]
        saved = [["Saved checkpoint", f"Iteration: {iteration}"] for iteration in (2, 3)]
        assert noted == [["Starting job"], *saved]
        assert all("# GPUs: 2" in line for line in lines)

    def test_the_logging_level_counts(self, run):
        assert "INFO:megatron.core" in run.output
