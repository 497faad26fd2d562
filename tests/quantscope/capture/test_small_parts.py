"""Coordinates, run ids, plain values, the state's precedence, and what importing costs."""

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.quantscope.capture import CaptureUsageError, ParallelCoordinates, TensorCollectionState, new_run_id
from megatron.quantscope.capture.metadata import _GEMMS, FIELDS, TensorMetadata, gemm_of, metadata_values
from megatron.quantscope.capture.plain import plain, to_json

ROOT = Path(__file__).resolve().parents[3]


def test_run_ids_have_their_form_and_differ_and_move_no_generator():
    random.seed(1)
    torch.manual_seed(1)
    state, torch_state = random.getstate(), torch.get_rng_state()
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"\d{8}_\d{6}_[0-9a-f]{6}", run_id) for run_id in ids)
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_coordinates():
    coordinates = ParallelCoordinates(tp_rank=1, tp_size=2, dp_rank=2, dp_size=4, ep_size=4)
    assert coordinates.world_size == 8
    assert coordinates.to_dict()["dp_rank"] == 2
    assert len(coordinates.to_dict()) == 12
    with pytest.raises(CaptureUsageError, match="tp_rank 2 is not allowed: give 0 <= rank < tp_size = 2"):
        ParallelCoordinates(tp_rank=2, tp_size=2)


def test_plain_values_become_built_in_types():
    value = plain({"a": (1, np.int64(2)), "b": np.float32(0.5), "c": [None, True, "x"]})
    assert value == {"a": [1, 2], "b": 0.5, "c": [None, True, "x"]}
    assert type(value["a"][1]) is int
    assert type(value["b"]) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {1: 2}}, r"metadata\['a'\] has the key 1"),
        ({"a": [object()]}, r"metadata\['a'\]\[0\] is a object"),
        ({"t": torch.zeros(1)}, r"metadata\['t'\] is a Tensor: give str, int"),
    ],
)
def test_values_that_no_reader_would_know_are_refused(value, message):
    with pytest.raises(CaptureUsageError, match=message):
        plain(value)


def test_json_is_strict_and_gives_non_finite_numbers_back():
    text = to_json({"loss": math.nan, "norms": [math.inf, -math.inf], "x": 1.5})
    data = json.loads(text, parse_constant=pytest.fail)
    assert math.isnan(float(data["loss"]))
    assert [float(x) for x in data["norms"]] == [math.inf, -math.inf]
    assert data["x"] == 1.5


def test_metadata_holds_every_field_of_the_design():
    design = (
        "rank sample_idx iteration layer_type operation quant_type tensor_name layer_idx phase component save_time "
        "module gemm sample_indices micro_batch parallel shard shape dtype stage recomputed formats run_id "
        "document_ids grad_scale head_dim softmax_scale routed"
    )
    assert set(FIELDS) == set(design.split())


def test_metadata_round_trip():
    metadata = TensorMetadata(
        layer_type="linear",
        operation="forward",
        quant_type="bf16",
        tensor_name="input",
        sample_indices=(3, 4),
        document_ids=((7,), (7, 8)),
        shape=(2, 3),
        shard=({"over": "tp", "dim": 0}, {"over": "cp", "dim": 0, "order": "zigzag"}),
        grad_scale=4.0,
        head_dim=64,
        softmax_scale=0.125,
        extra={"mine": 1},
    )
    row = json.loads(json.dumps(metadata.to_dict()))
    assert row["mine"] == 1
    assert TensorMetadata(**metadata_values(row), extra={"mine": 1}) == metadata


@pytest.mark.parametrize(("shard", "splits"), [(None, ()), ({"dim": 0, "over": "tp"}, ({"dim": 0, "over": "tp"},))])
def test_shards_of_schema_1_become_splits(shard, splits):
    row = {"layer_type": "linear", "operation": "forward", "quant_type": "bf16", "tensor_name": "input", "shard": shard}
    metadata = TensorMetadata(**metadata_values(row))
    assert (metadata.shard, metadata.document_ids, metadata.grad_scale) == (splits, (), 1.0)


def test_every_row_of_the_design_has_its_gemm():
    assert len(_GEMMS) == 16  # 7 rows a linear, 9 an attention
    assert gemm_of("linear", "backward", "weight") == "dgrad"
    assert gemm_of("linear", "backward", "grad_output") == "dgrad+wgrad"
    assert gemm_of("other", "forward", "input") is None


class TestState:
    def test_defaults(self):
        state = TensorCollectionState()
        assert (state.current_rank, state.current_sample_idx, state.current_iteration) == (0, 0, 0)
        assert (state.batch_idx, state.sequence_idx) == (0, 0)

    def test_environment_before_default_and_hand_before_environment(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setenv("CURRENT_SAMPLE_IDX", "17")
        monkeypatch.setenv("TENSOR_SAVER_ITERATION", "5")
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
        state = TensorCollectionState()
        assert (state.current_rank, state.current_sample_idx, state.current_iteration) == (3, 17, 5)
        state.current_rank, state.current_sample_idx, state.current_iteration = 0, 0, 0
        assert (state.current_rank, state.current_sample_idx, state.current_iteration) == (0, 0, 0)
        state.current_rank = None
        assert state.current_rank == 3

    def test_torch_distributed_before_local_rank(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 11)
        assert TensorCollectionState().current_rank == 11

    def test_words_are_not_numbers(self, monkeypatch):
        monkeypatch.setenv("CURRENT_SAMPLE_IDX", "first")
        with pytest.raises(CaptureUsageError, match="CURRENT_SAMPLE_IDX='first' is not allowed"):
            TensorCollectionState().current_sample_idx  # noqa: B018
        with pytest.raises(CaptureUsageError, match="rank -1 is not allowed"):
            TensorCollectionState().current_rank = -1


@pytest.mark.parametrize(
    "statement",
    [
        "from megatron.quantscope.capture import CaptureConfig, CaptureError, CaptureSession, Site, TensorSaver",
        "from megatron.quantscope.capture import open_capture, parse_name",
    ],
)
def test_importing_is_light(statement):
    code = f"import sys; {statement}; assert not {{'torch', 'pandas', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
