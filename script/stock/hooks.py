"""Megatron-LM's functions that are wrapped, and what the wrappers tell the capture session.

| function of `megatron.training` | what its wrapper adds |
|---|---|
| `arguments.add_megatron_arguments` | our flags |
| `training.setup_model_and_optimizer` | quantises the model's GEMMs and opens the capture |
| `training.train_step` | the iteration's beginning and end, and each micro-batch with its samples |
| `training.checkpoint_and_decide_exit` | training ends after --control-iter iterations |

They are looked up as attributes of their modules at every call, in Megatron-LM 0.14 to 0.19, so replacing the
attribute is enough. Evaluation runs outside `train_step`, where nothing is kept.

Samples: Megatron-LM's batches do not say which samples they hold. Its sampler reads the stream in order, so the place
of a sample in the stream follows from how many were consumed: the same number that this tree's trainer gives.
With --dataloader-type cyclic the stream is a shuffled one.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.quantscope.capture import CaptureConfig, CaptureError, CaptureSession
from megatron.quantscope.columns import aligned
from megatron.quantscope.gemm import QuantConfig
from megatron.quantscope.gemm.resolved import table
from script.stock import flags

_COLLECTED = "all iterations that were to be collected are (--control-iter)"
_GRAD_NORM = 5  # place of the gradient norm in what train_step returns; the losses come first


class Instruments:
    """Quantisation and capture of one run of a stock trainer.

    Args:
        recipe: What is quantised how.
        capture: What is kept.
    """

    def __init__(self, recipe: QuantConfig, capture: CaptureConfig) -> None:
        self._recipe, self._capture = recipe, capture
        self._session: CaptureSession | None = None

    def install(self) -> None:
        """Wrap Megatron-LM's functions.

        Raises:
            UsageError: when one of them is not there.
        """
        wrappers = {
            "arguments.add_megatron_arguments": flags.adding,
            "training.setup_model_and_optimizer": self._attaching,
            "training.train_step": self._telling,
            "training.checkpoint_and_decide_exit": self._ending,
        }
        for name, wrapper in wrappers.items():
            wrap(name, wrapper)

    def close(self) -> None:
        """Wait until everything is on disk, and say what was kept.

        Raises:
            CaptureError: when collecting ended early and --tensor-on-error says that this ends the run.
        """
        session, self._session = self._session, None
        if session is None:
            return
        session.close()
        from megatron.core.attachment import kept

        _print_rank_0(kept(session))
        if session.failed and session.config.stop_on_error:
            raise CaptureError(f"--tensor-on-error stop: {session.failed}")

    def _attaching(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
            built = upstream(*args, **options)
            self._attach(built[0])
            return built

        return setup_model_and_optimizer

    def _attach(self, model: list[Any]) -> None:
        from megatron.core import attachment
        from megatron.core.resolution import resolve

        args = _args()
        self._recipe.write_back(args)
        self._capture.write_back(args)
        try:
            modules = resolve(self._recipe, model, args.num_layers)
            if self._recipe.quantizes:
                _print_rank_0(aligned(table(modules, args.num_layers)))
            self._session, sites = attachment.attach(
                args, model, self._recipe, self._capture, compute_dtype=args.params_dtype, modules=modules
            )
        except ValueError as error:
            raise flags.UsageError(str(error)) from None
        if self._session is not None:
            _print_rank_0(f"keeping tensors at {sites} places of all ranks in {self._capture.directory}")

    def _telling(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def train_step(forward_step: Any, data: Any, model: Any, optimizer: Any, *others: Any, **options: Any) -> Any:
            session = self._session
            if session is None:
                return upstream(forward_step, data, model, optimizer, *others, **options)
            from megatron.core.attachment import gradient_scale

            args = _args()
            session.begin_iteration(args.curr_iteration)
            learning_rate = optimizer.param_groups[0]["lr"]
            told = _telling_micro_batches(forward_step, session, args, gradient_scale(args, optimizer))
            result = upstream(told, data, model, optimizer, *others, **options)
            session.end_iteration(_scalars(result, learning_rate))
            return result

        return train_step

    def _ending(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def checkpoint_and_decide_exit(
            model: Any, optimizer: Any, scheduler: Any, iteration: int, flops: Any, context: Any, data: Any
        ) -> bool:
            state = (model, optimizer, scheduler)
            exits = bool(upstream(*state, iteration, flops, context, data))
            if exits or self._session is None or not self._session.finished:
                return exits
            args = _args()
            if args.save and not (args.save_interval and iteration % args.save_interval == 0):
                save = importlib.import_module("megatron.training.training").save_checkpoint_and_time
                save(iteration, *state, flops, context, train_data_iterator=data)
            _print_rank_0(f"training ends after iteration {iteration}: {_COLLECTED}")
            return True

        return checkpoint_and_decide_exit


def wrap(name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace the function of `megatron.training` that `name` ("module.function") gives by what `wrapper` makes of it.

    Raises:
        UsageError: when it is not there.
    """
    module_name, _, attribute = name.rpartition(".")
    module = importlib.import_module(f"megatron.training.{module_name}")
    function = getattr(module, attribute, None)
    if function is None:
        raise flags.UsageError(
            f"{module.__file__} has no {attribute}, which instrument.py wraps; known to work: Megatron-LM 0.14 to 0.19"
        )
    setattr(module, attribute, wrapper(function))


def _telling_micro_batches(
    forward_step: Callable[..., Any], session: CaptureSession, args: argparse.Namespace, grad_scale: float
) -> Callable[..., Any]:
    """`forward_step`, and before each call the session is told which samples are coming.

    Micro-batches are counted for each model chunk: under an interleaved schedule the chunks take turns.
    """
    drawn: Counter[int] = Counter()

    @functools.wraps(forward_step)
    def told(data: Any, model: Any, *others: Any, **options: Any) -> Any:
        micro_batch = drawn[id(model)]
        drawn[id(model)] += 1
        session.begin_micro_batch(micro_batch, sample_indices(args, micro_batch), grad_scale=grad_scale)
        return forward_step(data, model, *others, **options)

    return told


def sample_indices(args: argparse.Namespace, micro_batch: int) -> range:
    """The places in the stream of this rank's samples of one micro-batch, before the iteration's are counted."""
    from megatron.core import parallel_state

    place = micro_batch * parallel_state.get_data_parallel_world_size() + parallel_state.get_data_parallel_rank()
    first = args.consumed_train_samples + place * args.micro_batch_size
    return range(first, first + args.micro_batch_size)


def _scalars(result: tuple[Any, ...], learning_rate: float) -> dict[str, float]:
    """What goes into the commit record, from what `train_step` returned; only the last pipeline stage has losses."""
    losses: Mapping[str, Any] = result[0]
    values = {name: float(value) for name, value in losses.items()}
    if result[_GRAD_NORM] is not None:
        values["grad norm"] = float(result[_GRAD_NORM])
    return values | {"learning rate": float(learning_rate)}


def _args() -> argparse.Namespace:
    return importlib.import_module("megatron.training").get_args()


def _print_rank_0(text: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(text, flush=True)
