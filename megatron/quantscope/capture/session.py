"""A capture session: what is kept of one training run, and when.

The training loop tells the session where it stands, modules ask it for a tap, and the sink does the writing:

    session.begin_iteration(i)                        i = iterations completed before this one
        session.begin_micro_batch(m, sample_indices)
            tap = site.tap()                          None when nothing is to be kept now
            tap("forward", "pre", "input", x)         ... and so on, also from the backward
    session.end_iteration({"lm loss": ...})
    if session.finished: break                        after --control-iter collected iterations
    session.close()

`finished` depends on the loop alone and not on what reached the disk, so all ranks of a run stop at one iteration,
and a full disk does not change for how long a model is trained.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.config import CaptureConfig
from megatron.quantscope.capture.coordinates import ParallelCoordinates
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.listener import RowListener
from megatron.quantscope.capture.metadata import Split
from megatron.quantscope.capture.names import check_part
from megatron.quantscope.capture.plain import plain
from megatron.quantscope.capture.run_record import write_run_record
from megatron.quantscope.capture.sink import SinkSettings, TensorSink
from megatron.quantscope.capture.site import Moment, Shown, Site
from megatron.quantscope.capture.state import STATE
from megatron.quantscope.capture.termination import TerminationWatch

if TYPE_CHECKING:
    import torch

_OUTCOMES = {
    False: "training goes on; --tensor-on-error stop would end it",
    True: "training stops after this iteration, as --tensor-on-error stop says",
}


@dataclass(frozen=True, kw_only=True)
class CaptureSummary:
    """What a session has written.

    Attributes:
        iterations: Iterations that are complete on disk.
        rows: Manifest rows, references among them.
        files: Tensor files.
        bytes: Bytes of the tensor files.
        seconds: Wall time since the session began.
        copy_seconds: Time the training thread has spent copying tensors.
        waited_seconds: Time the training thread has waited for room.
    """

    iterations: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0
    waited_seconds: float = 0.0


class CaptureSession:
    """Keeps tensors of one training run, as one rank of it. All methods belong to the training thread.

    Args:
        config: What to keep, where, and within which bounds.
        quant_type: Quant type of the run, or the compute dtype where nothing is quantised: names the type folder.
        rank: Global rank.
        parallel: Where this rank stands.
        run_id: Name of the run (`new_run_id`), the same on every rank.
        run_info: What `run.json` is to hold beside the capture's own settings: configuration, versions, command.

    Raises:
        CaptureError: when the directory can not be written.
        CaptureUsageError: for a quant type or run id that can not be part of a name.
    """

    def __init__(
        self,
        config: CaptureConfig,
        *,
        quant_type: str,
        rank: int,
        parallel: ParallelCoordinates,
        run_id: str,
        run_info: Mapping[str, Any],
    ) -> None:
        check_part("quant_type", quant_type)
        check_part("run_id", run_id)
        self.config = config
        self.identity: dict[str, Any] = {
            "quant_type": quant_type,
            "rank": rank,
            "run_id": run_id,
            "parallel": parallel.to_dict(),
        }
        self.moment: Moment | None = None  # None: nothing is kept now
        self._sink: TensorSink | None = None
        self._first_iteration: int | None = None
        self._iteration = 0
        self._next_step = 0  # iterations since this start
        self._collecting = False
        self._collected = 0  # iterations whose turn it was, whatever reached the disk
        self._suspended = False
        self._start = time.perf_counter()
        if config.filter.keeps_rank(rank):
            self._sink = self._open_sink(parallel.world_size, run_info)
        STATE.current_rank, STATE.directory, STATE.run_id, STATE.session = rank, config.directory, run_id, self
        self._process = os.getpid()
        atexit.register(self.close)
        self._watch = TerminationWatch(lambda: self.close("the process was terminated"))
        self._watch.install()

    def site(
        self,
        *,
        module: str,
        layer_type: str,
        component: str,
        layer_idx: int | None,
        formats: Mapping[str, Any],
        shards: Mapping[str, Sequence[Split]] | None = None,
        leave_out: Collection[str] = (),
        **facts: Any,
    ) -> Site | None:
        """A place for one module's tensors; None when the filter keeps none of them.

        Takes the attributes of `Site`; those that have defaults there are `facts`.

        Raises:
            CaptureUsageError: for a part that can not be in a file name, and for values that metadata can not hold.
        """
        check_part("layer_type", layer_type)
        check_part("component", component)
        if self._sink is None or not self.config.filter.keeps_module(module, layer_idx, layer_type):
            return None
        self._sink.sites += 1
        return Site(
            session=self,
            module=module,
            layer_type=layer_type,
            component=component,
            layer_idx=layer_idx,
            formats=plain(formats, "formats"),
            shards={name: tuple(plain(splits, "shards")) for name, splits in (shards or {}).items()},
            leave_out=frozenset(leave_out),
            **facts,
        )

    @property
    def sites(self) -> int:
        """How many places of this rank tensors are kept at."""
        return 0 if self._sink is None else self._sink.sites

    def listen(self, listener: RowListener) -> None:
        """Tell `listener` of every row from now on; call it before the first iteration, and at most once."""
        if self._sink is not None:
            self._sink.listen(listener)

    def begin_iteration(self, iteration: int) -> None:
        """An iteration begins; `iteration` counts those completed before it, also before a resume."""
        if self._first_iteration is None:
            self._first_iteration = iteration
        self._iteration = iteration
        self._next_step = iteration - self._first_iteration
        self._collecting = not self.finished and self.config.schedule.collects(self._next_step)
        self.moment = None
        STATE.current_iteration = iteration

    def begin_micro_batch(
        self,
        micro_batch: int,
        sample_indices: Sequence[int],
        *,
        document_ids: Sequence[Sequence[int]] = (),
        grad_scale: float = 1.0,
    ) -> None:
        """A micro-batch's forward begins; its samples are given by their global indices.

        Args:
            micro_batch: Its number in the iteration, from 0.
            sample_indices: The samples, as the sampler counts them over all ranks.
            document_ids: For each sample the documents it is made of.
            grad_scale: As in `TensorMetadata`.
        """
        if self._suspended:
            return
        indices = tuple(int(index) for index in sample_indices)
        keeps = self._collecting and micro_batch < self.config.collect_micro_batches and not self.failed
        self.moment = None
        if keeps:
            self.moment = Moment(
                iteration=self._iteration,
                micro_batch=micro_batch,
                sample_indices=indices,
                document_ids=tuple(tuple(int(each) for each in documents) for documents in document_ids),
                grad_scale=grad_scale,
            )
        STATE.batch_idx = micro_batch
        STATE.current_sample_idx = indices[0] if indices else 0

    def keep(self, tensor: torch.Tensor, shown: Shown) -> None:
        """Take one tensor; called by the taps. Copies it before returning, and never raises."""
        if self._sink is not None:
            self._sink.keep(tensor, shown)

    def end_iteration(self, scalars: Mapping[str, float]) -> None:
        """The iteration is complete; `scalars` (loss, gradient norm, ...) go into its commit record.

        Does not wait for the disk.

        Raises:
            CaptureError: when collecting has ended early and the configuration says that training stops then.
        """
        self.moment = None
        self._next_step = self._iteration - (self._first_iteration or 0) + 1
        if self._collecting:
            self._collected += 1
            if self._sink is not None:
                self._sink.end_iteration(self._iteration, {name: float(value) for name, value in scalars.items()})
        self._collecting = False
        if self.failed and self.config.stop_on_error:
            raise CaptureError(self.failed)

    @property
    def finished(self) -> bool:
        """Whether all that was asked for has been collected, so that training stops; never with --control-iter 0."""
        collected_all = self._collected >= self.config.control_iter
        return self.config.control_iter > 0 and (collected_all or self.config.schedule.exhausted(self._next_step))

    @property
    def failed(self) -> str | None:
        """Why collecting ended early; None while it has not."""
        return self._sink.failed if self._sink is not None else None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep nothing inside this block: for evaluation."""
        before = (self.moment, self._suspended)
        self.moment, self._suspended = None, True
        try:
            yield
        finally:
            self.moment, self._suspended = before

    def close(self, reason: str | None = None) -> None:
        """Wait until everything is on disk and end the run; idempotent, and called at exit if it was not before.

        Args:
            reason: Why the run ends before its time; None: it does not.
        """
        if os.getpid() != self._process:
            return  # a forked child ends, and not the run
        if self._sink is not None:
            self._sink.close(reason)
        self.moment, self._collecting = None, False  # not before: the training thread may be within an iteration
        self._watch.remove()  # now that nothing waits to be flushed
        atexit.unregister(self.close)
        if STATE.run_id == self.identity["run_id"]:
            STATE.directory = STATE.run_id = STATE.session = None

    def summary(self) -> CaptureSummary:
        """What has been written by now; final after `close`."""
        sink, seconds = self._sink, time.perf_counter() - self._start
        if sink is None:
            return CaptureSummary(seconds=seconds)
        return CaptureSummary(
            **vars(sink.total),
            iterations=sink.committed,
            seconds=seconds,
            copy_seconds=sink.copy_seconds,
            waited_seconds=sink.waited_seconds,
        )

    def _open_sink(self, world_size: int, run_info: Mapping[str, Any]) -> TensorSink:
        """The run's record and this rank's sink; every rank that keeps anything has an equal share of the budget."""
        identity = self.identity
        folder = self.config.directory / identity["quant_type"]
        if not self.config.dry_run:
            fields = {**run_info, **{key: identity[key] for key in ("run_id", "quant_type")}, "world_size": world_size}
            write_run_record(folder / RUNS_FOLDER / identity["run_id"], self.config, fields)
        settings = SinkSettings(
            config=self.config,
            folder=folder,
            run_id=identity["run_id"],
            rank=identity["rank"],
            budget_bytes=self.config.budget_bytes // max(1, self.config.filter.kept_ranks(world_size)),
            outcome=_OUTCOMES[self.config.stop_on_error],
        )
        return TensorSink(settings)
