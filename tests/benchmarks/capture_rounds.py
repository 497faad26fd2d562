"""The three measurements of one mode of capture: pairs of steps, blocked time, and replays to disk.

Ratios are taken between two things that ran one after the other, so that a machine that is busy for a while slows both;
the first of every kind warms up and is dropped. Files are deleted after each step,
before the operating system gets round to writing them, so no step pays for the disk traffic of one before.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates, new_run_id
from tests.benchmarks.capture_model import Trainer
from tests.benchmarks.capture_watch import Recorder, Stopwatch, WatchedSession

QUANT_TYPE = "fp32"
NO_BUDGET = 10**15
POLL_SECONDS = 0.005
RAW_PIECE = 4 << 20
SHORT_POLL_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to capture, and what it may cost.

    Attributes:
        name: What the table calls it.
        save_mode: --tensor-save-mode.
        save_format: --tensor-save-format.
        cpu: At most so many times the bare step's CPU time; None: just to know.
        blocked: At most so many times a memcpy.
        disk: At least so many times the bytes a second of a raw write; None: just to know.
    """

    name: str
    save_mode: str
    save_format: str
    cpu: float | None = None
    blocked: float | None = None
    disk: float | None = None


@dataclass
class Usage:
    """Files and bytes below a folder."""

    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """Seconds of one step: of all threads' CPU and of the clock, until its iteration is on disk and until it ends."""

    cpu: float
    wall: float
    cpu_at_end: float
    wall_at_end: float
    loss: float


@dataclass
class StepRatios:
    """One list each, an entry a pair.

    Attributes:
        cpu: CPU time of all threads until the iteration is on disk, by that of the bare step.
        cpu_at_end: CPU time of all threads until the step ends, whatever is still to be written.
        wall_at_end: Wall time until the step ends.
        bare: Seconds of CPU of the bare step.
        usage: Files that the last iteration has written.
        unequal: Pairs whose losses are not the same bits.
    """

    cpu: list[float] = field(default_factory=list)
    cpu_at_end: list[float] = field(default_factory=list)
    wall_at_end: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    unequal: int = 0

    def add(self, captured: TimedStep, bare: TimedStep, *, warming_up: bool) -> None:
        """Take in a pair; of one that warms up only whether it was equal."""
        self.unequal += captured.loss != bare.loss
        if not warming_up:
            self.cpu.append(captured.cpu / bare.cpu)
            self.cpu_at_end.append(captured.cpu_at_end / bare.cpu)
            self.wall_at_end.append(captured.wall_at_end / bare.wall)
            self.bare.append(bare.cpu)


@dataclass
class BlockedRatios:
    """Time within capture by that of a memcpy, an entry a step.

    Attributes:
        wall: Of the clock.
        cpu: Of the training thread's own CPU: what is left when it does not have to wait for other threads.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass
class DiskRatios:
    """Bytes a second of a replay by those of a raw write, an entry a round.

    Attributes:
        written: Of as many bytes as the replay has written.
        shown: Of as many bytes as the replay was shown.
    """

    written: list[float] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)


@contextlib.contextmanager
def open_session(mode: Mode, directory: Path) -> Iterator[CaptureSession]:
    """A session of one rank that never ends by itself; closed and its files deleted at the end."""
    config = CaptureConfig(
        enabled=True,
        directory=directory,
        control_iter=0,
        budget_bytes=NO_BUDGET,
        mode=mode.save_mode,
        save_format=mode.save_format,
    )
    session = CaptureSession(
        config, quant_type=QUANT_TYPE, rank=0, parallel=ParallelCoordinates(), run_id=new_run_id(), run_info={}
    )
    try:
        yield session
    finally:
        session.close()
        shutil.rmtree(directory)
        gc.collect()


def wait_for(session: CaptureSession, iterations: int, poll: float = POLL_SECONDS) -> None:
    """Wait until so many iterations of `session` are on disk.

    Raises:
        RuntimeError: when collecting has ended early.
    """
    while session.summary().iterations < iterations:
        if session.failed:
            raise RuntimeError(session.failed)
        time.sleep(poll)


def take_files(directory: Path) -> Usage:
    """What the iteration before has written; the files are gone after that, all but the run's records."""
    usage = Usage()
    for path in directory.rglob("*"):
        if path.suffix in (".pt", ".safetensors"):
            usage.files += 1
            usage.bytes += path.stat().st_size
            path.unlink()
    return usage


def pair_steps(mode: Mode, bare: Trainer, captured: Trainer, pairs: int, directory: Path) -> StepRatios:
    """Train two equal models side by side, one of them captured; they must stay equal to the bit."""
    ratios = StepRatios()
    with open_session(mode, directory) as session:
        captured.watch(session)
        for number in range(pairs + 1):
            timed: dict[Trainer, TimedStep] = {}
            order = ((bare, None), (captured, session))
            for trainer, its_session in order if number % 2 else reversed(order):
                timed[trainer] = _timed_step(trainer, its_session, number + 1)
            ratios.usage = take_files(directory)
            ratios.add(timed[captured], timed[bare], warming_up=number == 0)
    return ratios


def _timed_step(trainer: Trainer, session: CaptureSession | None, iterations: int) -> TimedStep:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = trainer.step(session)
    cpu_at_end, wall_at_end = time.process_time() - cpu, time.perf_counter() - wall
    if session is not None:
        wait_for(session, iterations)
    return TimedStep(
        cpu=time.process_time() - cpu,
        wall=time.perf_counter() - wall,
        cpu_at_end=cpu_at_end,
        wall_at_end=wall_at_end,
        loss=loss,
    )


def raw_step_ratios(trainer: Trainer, size: int, pairs: int, path: Path) -> list[float]:
    """CPU time of a bare step while a thread writes `size` bytes to a file, evenly, by that of a bare step alone.

    What no capture of so many bytes can do without. Writing costs more here than in `disk_ratios`: memory that has been
    free for a second may have been handed back to the host of a virtual machine, and is asked for again page by page.
    """
    ratios = []
    piece = memoryview(bytearray(RAW_PIECE))
    for number in range(pairs + 1):
        bare = _timed_step(trainer, None, 0)
        writer = threading.Thread(target=_write_slowly, args=(piece, size, bare.wall, path))
        cpu = time.process_time()
        writer.start()
        trainer.step()
        writer.join()
        cpu = time.process_time() - cpu
        path.unlink()
        if number:
            ratios.append(cpu / bare.cpu)
    return ratios


def _write_slowly(piece: memoryview, size: int, seconds: float, path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, size, RAW_PIECE):
            file.write(piece[: size - begin])
            time.sleep(seconds * RAW_PIECE / size)


def blocked_ratios(mode: Mode, trainer: Trainer, steps: int, shown: int, directory: Path) -> BlockedRatios:
    """Hold the time that the training thread spends within capture against memcpys of the same tensors."""
    ratios = BlockedRatios()
    stopwatch = Stopwatch(shown)
    with open_session(mode, directory) as session:
        watched = WatchedSession(session, stopwatch)
        trainer.watch(watched)
        for number in range(steps + 1):
            stopwatch.start_step()
            trainer.step(watched)
            wait_for(session, number + 1)
            take_files(directory)
            if number:
                ratios.wall.append(stopwatch.blocked.wall / stopwatch.copied.wall)
                ratios.cpu.append(stopwatch.blocked.cpu / stopwatch.copied.cpu)
    return ratios


def record_step(trainer: Trainer, directory: Path) -> Recorder:
    """The rows that one step of `trainer` shows."""
    recorder = Recorder()
    with open_session(Mode(name="", save_mode="tensors", save_format="pt"), directory) as session:
        watched = WatchedSession(session, recorder)
        trainer.watch(watched)
        trainer.step(watched)
    return recorder


def disk_ratios(mode: Mode, recorder: Recorder, rounds: int, directory: Path) -> DiskRatios:
    """Replay a step's rows to disk, and write as many bytes in one go beside it."""
    arrays = [memoryview(tensor.contiguous().view(-1).numpy()).cast("B") for _, _, tensor in recorder.rows]
    ratios = DiskRatios()
    with open_session(mode, directory) as session:
        for number in range(rounds + 1):
            recorder.change()
            start = time.perf_counter()
            recorder.replay(session, number)
            wait_for(session, number + 1, SHORT_POLL_SECONDS)
            seconds = time.perf_counter() - start
            written = take_files(directory).bytes
            if number:
                ratios.written.append(_raw_write(arrays, written, directory / "raw") / seconds)
                ratios.shown.append(_raw_write(arrays, recorder.bytes, directory / "raw") / seconds)
    return ratios


def _raw_write(arrays: list[memoryview], size: int, path: Path) -> float:
    """Seconds to write the first `size` bytes of `arrays`, beginning anew behind the last, to a new file."""
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        left = size
        while left:
            for array in arrays:
                left -= file.write(array[:left])
                if not left:
                    break
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds
