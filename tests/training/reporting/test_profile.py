"""Profiles: which iterations, on which ranks, by which tool; and what a machine without GPU answers."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from megatron.training.reporting import profile
from megatron.training.reporting.profile import profiling

ITERATIONS = 5


@pytest.fixture
def args(tmp_path):
    return SimpleNamespace(
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=1,
        profile_step_end=3,
        profile_ranks=[0],
        pytorch_profiler_collect_shapes=True,
        pytorch_profiler_collect_callstack=False,
        record_memory_history=False,
        memory_snapshot_path=str(tmp_path / "snapshot.pickle"),
        tensorboard_dir=str(tmp_path / "board"),
        save=None,
    )


def work(size):
    matrix = torch.ones(size, size)
    return matrix @ matrix


def run(args, iterations=ITERATIONS):
    """`iterations` of a product of matrices of 8, 16, ... rows: the size says which iteration an event is of."""
    with profiling(args) as profiler:
        for iteration in range(iterations):
            profiler.begin()
            work(8 * (iteration + 1))
            profiler.end()


def sizes_in(directory):
    (trace,) = directory.glob("*.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::mm"]


@pytest.mark.usefixtures("one_rank")
class TestTorchProfiler:
    def test_the_trace_has_the_iterations_asked_for(self, args, tmp_path, capsys):
        run(args)
        assert sizes_in(tmp_path / "board") == [16, 24]
        assert capsys.readouterr().out == f"profile of rank 0 written to {tmp_path / 'board'}\n"

    def test_a_run_that_ends_within_writes_what_there_is(self, args, tmp_path):
        run(args, iterations=2)
        assert sizes_in(tmp_path / "board") == [16]

    def test_a_failure_within_writes_what_there_is(self, args, tmp_path):
        def train():
            with profiling(args) as profiler:
                profiler.begin()
                work(8)
                profiler.end()
                profiler.begin()
                work(16)
                raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            train()
        assert sizes_in(tmp_path / "board") == [16]

    @pytest.mark.parametrize("iterations", [0, 1])
    def test_a_run_that_ends_before_says_so(self, args, tmp_path, capsys, iterations):
        run(args, iterations)
        assert not (tmp_path / "board").exists()
        assert capsys.readouterr().out == (
            f"--profile: training ended after {iterations} iterations, before iteration 2 of this start: nothing was "
            "profiled on rank 0\n"
        )

    def test_other_ranks_are_not_profiled(self, args, tmp_path, capsys):
        args.profile_ranks = [1]
        run(args)
        assert not (tmp_path / "board").exists()

    def test_traces_go_to_the_checkpoints_without_tensorboard(self, args, tmp_path):
        args.tensorboard_dir, args.save = None, str(tmp_path / "save")
        run(args)
        assert sizes_in(tmp_path / "save") == [16, 24]

    def test_nsight_needs_a_gpu(self, args, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        args.use_pytorch_profiler = False
        run(args)
        assert capsys.readouterr().out.splitlines()[0] == (
            "--profile: Nsight Systems needs CUDA; without a GPU this is torch's profiler"
        )
        assert sizes_in(tmp_path / "board") == [16, 24]


@pytest.mark.usefixtures("one_rank")
class TestWithGpu:
    """What is asked of CUDA, by a stand-in for it."""

    @pytest.fixture
    def calls(self, monkeypatch):
        calls = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
        monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda **_: contextlib.nullcontext())
        return calls

    def test_marks_for_nsight_stand_around_the_iterations(self, args, calls):
        args.use_pytorch_profiler = False
        with profiling(args) as profiler:
            for iteration in range(ITERATIONS):
                profiler.begin()
                calls.append(iteration)
                profiler.end()
        assert calls == [0, "start", 1, 2, "stop", 3, 4]

    def test_memory_history_is_written_at_the_end(self, args, calls, monkeypatch):
        memory = SimpleNamespace(
            _record_memory_history=lambda max_entries: calls.append("record"),
            _dump_snapshot=lambda path: calls.append(("dump", path)),
        )
        monkeypatch.setattr(profile.torch.cuda, "memory", memory)
        args.profile, args.record_memory_history = False, True
        run(args)
        assert calls == ["record", ("dump", args.memory_snapshot_path)]
