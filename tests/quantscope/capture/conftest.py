"""Sessions in a temporary directory, and one made-up module that shows its tensors as Megatron's linears do."""

import pytest
import torch

from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates, new_run_id, open_capture
from megatron.quantscope.capture.state import STATE

FORMATS = {"fprop": {"x": "mxfp8", "w": "mxfp8"}, "scale_rule": "floor"}
LINEAR = {
    "module": "decoder.layers.0.mlp.linear_fc1",
    "layer_type": "linear",
    "component": "linear",
    "layer_idx": 0,
    "formats": FORMATS,
}
ROWS_A_PASS = 7
FILES_A_PASS = 6  # the weight of the backward refers to the forward's


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """No coordinates from another test or from the machine."""
    for name in (
        "TENSOR_SAVE_ENABLED",
        "TENSOR_SAVE_DIR",
        "TENSOR_SAVER_ITERATION",
        "CURRENT_SAMPLE_IDX",
        "LOCAL_RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    before = dict(vars(STATE))
    vars(STATE).update(vars(type(STATE)()))
    yield
    vars(STATE).update(before)


@pytest.fixture
def open_session(tmp_path):
    """`open_session(rank=..., quant_type=..., **config)` -> a session that is closed after the test."""
    sessions = []

    def open_(*, rank=0, quant_type="mxfp8", parallel=None, run_id=None, run_info=None, **config):
        session = CaptureSession(
            CaptureConfig(**({"enabled": True, "directory": tmp_path / "capture"} | config)),
            quant_type=quant_type,
            rank=rank,
            parallel=parallel or ParallelCoordinates(),
            run_id=run_id or new_run_id(),
            run_info=run_info or {},
        )
        sessions.append(session)
        return session

    yield open_
    for session in sessions:
        session.close()


def linear_tensors(seed=0, tokens=4, inputs=8, outputs=16, dtype=torch.bfloat16):
    """What a linear layer shows in one pass: tensor name -> tensor."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "input": (tokens, 1, inputs),
        "weight": (outputs, inputs),
        "output": (tokens, 1, outputs),
        "grad_output": (tokens, 1, outputs),
        "grad_input": (tokens, 1, inputs),
        "grad_weight": (outputs, inputs),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def show_forward(tap, tensors):
    tap("forward", "pre", "input", tensors["input"])
    tap("forward", "pre", "weight", tensors["weight"])
    tap("forward", "post", "output", tensors["output"])


def show_backward(tap, tensors):
    tap("backward", "pre", "grad_output", tensors["grad_output"])
    tap("backward", "pre", "weight", tensors["weight"])
    tap("backward", "post", "grad_input", tensors["grad_input"])
    tap("backward", "post", "grad_weight", tensors["grad_weight"])


def run_iteration(session, iteration, *, micro_batches=1, tensors=None, site=None, scalars=None):
    """One iteration of a training loop over one watched module."""
    site = site or session.site(**LINEAR)
    tensors = tensors or linear_tensors(iteration)
    session.begin_iteration(iteration)
    for micro_batch in range(micro_batches):
        session.begin_micro_batch(micro_batch, [10 * iteration + micro_batch])
        tap = site.tap() if site else None
        if tap:
            show_forward(tap, tensors)
            show_backward(tap, tensors)
    session.end_iteration(scalars or {"lm loss": 3.0})


def read(session):
    """The capture of a session that had no trouble."""
    session.close()
    capture = open_capture(session.config.directory)
    assert capture.problems == []
    return capture


def rows_of(capture, **wanted):
    return [record for record in capture.records if all(getattr(record, k) == v for k, v in wanted.items())]
