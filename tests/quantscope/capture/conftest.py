"""Sessions in a temporary directory, and one made-up module that shows its tensors as Megatron's linears do."""

import json

import numpy as np
import pytest
import torch

from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates, new_run_id, open_capture
from megatron.quantscope.capture.budget import Budget
from megatron.quantscope.capture.hashing import checksum
from megatron.quantscope.capture.segments import Segments
from megatron.quantscope.capture.state import STATE
from tests.quantscope.capture.children import Children

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
FORMATS_OF_FILES = ("pt", "segment")
MODES = ("tensors", "statistics", "both")

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
FLOAT8 = tuple(dtype for name, dtype in sorted(vars(torch).items()) if name.startswith("float8_"))
NUMBERS = torch.tensor([1.0, -2.5, 0.0, -0.0, 448.0, 1e-9, float("nan"), 3.25])
ODD_TENSORS = {
    "contiguous": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(4, 6).t(),
    "strided": lambda: torch.arange(24.0)[::3],
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 1000),
    "view of a large storage": lambda: torch.arange(100_000.0)[10:20],
    "0-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(3, 0, 2),
    "channels last": lambda: torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    "nan and inf": lambda: torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 1e-45]),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "part of a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: NUMBERS.bfloat16(),
    "float16": lambda: NUMBERS.half(),
    "float64": lambda: NUMBERS.double(),
    "complex": lambda: torch.complex(NUMBERS, NUMBERS.flip(0)),
    "conjugated": lambda: torch.complex(NUMBERS, NUMBERS.flip(0)).conj(),
    "negated": lambda: torch.complex(NUMBERS, NUMBERS.flip(0)).conj().imag,
    **{str(dtype).removeprefix("torch."): lambda dtype=dtype: torch.arange(9).to(dtype) for dtype in INTEGERS},
    **{str(dtype).removeprefix("torch."): lambda dtype=dtype: NUMBERS.abs().to(dtype) for dtype in FLOAT8},
}


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


@pytest.fixture(scope="session")
def children():
    """Processes that capture, to be ended by signals."""
    children = Children()
    yield children
    children.close()


@pytest.fixture
def open_segments(tmp_path):
    def open_(expected=100, budget=1 << 40, **options):
        labels = {"run_id": "run", "quant_type": "bf16", "rank": "3"}
        budget = Budget(budget)
        return Segments(tmp_path, rank=3, labels=labels, budget=budget, tensors_expected=lambda: expected, **options)

    return open_


def bits(tensor):
    """The bytes of a tensor in row-major order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


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


def run_folder(session):
    identity = session.identity
    return session.config.directory / identity["quant_type"] / "runs" / identity["run_id"]


def manifest_of(session, kind=None):
    """The lines of a session's manifest, those of one kind or all."""
    path = run_folder(session) / f"manifest_rank{session.identity['rank']}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def stored_tensor(session, row):
    """What a manifest's row says is on disk, read by PyTorch and NumPy alone."""
    if row["store"] == "pt":
        return torch.load(run_folder(session).parents[1] / row["file"], weights_only=True)["tensor"]
    if row["bytes"] == 0:
        return torch.empty(row["shape"], dtype=getattr(torch, row["dtype"]))
    content = np.fromfile(run_folder(session) / row["file"], np.uint8, count=row["bytes"], offset=row["offset"])
    assert content.nbytes == row["bytes"]
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, row["dtype"])).reshape(row["shape"])


def unfinished_files(session):
    return sorted(path.name for path in session.config.directory.rglob(".*"))


def block_exponents(tensor, block=32):
    """The map of block exponents by NumPy: float32's exponent field of each block's amax along the last dimension."""
    values = np.abs(np.atleast_1d(tensor.detach().double().numpy()))
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % block)]
    blocks = np.pad(values, padding).reshape(*values.shape[:-1], -(-values.shape[-1] // block), block)
    amax = blocks.max(-1)  # a NaN stays one
    _, exponent = np.frexp(amax)
    field = np.where(amax < 2.0**-126, 0, exponent - 1 + 127)
    return torch.from_numpy(np.where(np.isfinite(amax), field, 255).astype(np.uint8))


def check_readable(capture, tensors_of=linear_tensors):
    """Every record gives back what was shown: `tensors_of(iteration)`."""
    for record in capture.records:
        expected = tensors_of(record.iteration)[record.tensor_name]
        if record.store != "none":
            assert torch.equal(bits(capture.load(record)), bits(expected))
        if record.blocks is not None:
            assert torch.equal(capture.block_exponents(record), block_exponents(expected))
        if not record.bare:
            assert record.statistics.count == expected.numel()
            assert record.statistics.amax == expected.double().abs().max()


def header_of(path):
    """The header of a safetensors file, as the format's specification lays it out."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


def append_to(segments, iteration, name, tensor):
    return segments.append(iteration, name, tensor, checksum(tensor))
