"""The public saving API, called as a user's own training code calls it."""

import errno
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core import tensor_saver
from megatron.core.tensor_saver import (
    TensorCollectionState,
    TensorSaver,
    get_current_rank_and_sample,
    get_tensor_collection_state,
    get_tensor_saver,
    initialize_tensor_collection,
    save_attention_tensors,
    save_linear_tensors,
    save_tensor,
    set_global_batch_idx,
    set_global_iteration,
    set_global_rank,
    set_global_sample_idx,
    set_global_sequence_idx,
)
from megatron.quantscope.capture import CaptureError, CaptureUsageError, open_capture, parse_name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_place(monkeypatch, tmp_path):
    """A working directory of its own, and no coordinates from elsewhere."""
    for name in (
        "TENSOR_SAVE_ENABLED",
        "TENSOR_SAVE_DIR",
        "TENSOR_SAVER_ITERATION",
        "CURRENT_SAMPLE_IDX",
        "LOCAL_RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.chdir(tmp_path)
    state = get_tensor_collection_state()
    before = dict(vars(state))
    vars(state).update(vars(TensorCollectionState()))
    yield
    vars(state).update(before)


def content_of(path):
    return torch.load(path, weights_only=True)


def test_without_any_configuration_it_saves_at_once():
    tensor = torch.randn(4, 3).bfloat16()
    path = save_tensor(tensor, "linear", "forward", "mxfp8", "input", layer_idx=2, phase="pre", component="linear")
    assert isinstance(path, str)
    assert os.path.dirname(path) == os.path.abspath("enhanced_tensor_logs/mxfp8")
    assert re.fullmatch(
        r"\d{8}_\d{6}_0001_iter000_linear_L2_forward_pre_linear_mxfp8_rank0_sample0_input.pt", os.path.basename(path)
    )
    content = content_of(path)
    assert set(content) == {"tensor", "metadata"}
    assert torch.equal(content["tensor"], tensor)


def test_metadata():
    tensor = torch.randn(4, 3)
    path = save_tensor(tensor, "attention", "backward", "hifp8", "grad_query", 1, "post", "FA", rank=3, sample_idx=9)
    metadata = content_of(path)["metadata"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", metadata.pop("save_time"))
    assert metadata == {
        "rank": 3,
        "sample_idx": 9,
        "iteration": 0,
        "layer_type": "attention",
        "operation": "backward",
        "quant_type": "hifp8",
        "tensor_name": "grad_query",
        "layer_idx": 1,
        "phase": "post",
        "component": "FA",
        "module": None,
        "gemm": "dq",
        "sample_indices": [],
        "document_ids": [],
        "micro_batch": 0,
        "parallel": {},
        "shard": [],
        "shape": [4, 3],
        "dtype": "float32",
        "stage": None,
        "recomputed": False,
        "grad_scale": 1.0,
        "formats": {},
        "head_dim": None,
        "softmax_scale": None,
        "routed": False,
        "run_id": None,
        "sequence_idx": 0,
    }


def test_phase_and_component_default_to_unknown():
    name = parse_name(os.path.basename(save_tensor(torch.ones(1), "linear", "forward", "bf16", "input")))
    assert (name.phase, name.component, name.layer_idx) == ("unknown", "unknown", None)


def test_names_never_repeat_and_go_on_after_what_is_there(tmp_path):
    folder = tmp_path / "there" / "bf16"
    folder.mkdir(parents=True)
    (folder / "20240601_101112_0041_linear_L0_forward_bf16_input.pt").touch()
    saver = TensorSaver(tmp_path / "there")
    paths = [saver.save_tensor(torch.ones(1), "linear", "forward", "bf16", "input") for _ in range(5)]
    assert [parse_name(os.path.basename(path)).counter for path in paths] == [42, 43, 44, 45, 46]


class TestCoordinates:
    def test_set_by_hand(self):
        set_global_rank(2)
        set_global_sample_idx(33)
        set_global_iteration(7)
        set_global_batch_idx(4)
        set_global_sequence_idx(5)
        assert get_current_rank_and_sample() == (2, 33)
        metadata = content_of(save_tensor(torch.ones(1), "linear", "forward", "bf16", "input"))["metadata"]
        assert {key: metadata[key] for key in ("rank", "sample_idx", "iteration", "micro_batch", "sequence_idx")} == {
            "rank": 2,
            "sample_idx": 33,
            "iteration": 7,
            "micro_batch": 4,
            "sequence_idx": 5,
        }

    def test_environment(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("CURRENT_SAMPLE_IDX", "12")
        monkeypatch.setenv("TENSOR_SAVER_ITERATION", "6")
        assert get_current_rank_and_sample() == (1, 12)
        path = save_tensor(torch.ones(1), "linear", "forward", "bf16", "input")
        assert "_iter006_" in path
        assert "_rank1_sample12_" in path
        set_global_rank(0)
        set_global_sample_idx(0)
        assert get_current_rank_and_sample() == (0, 0)

    def test_initialize(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "5")
        initialize_tensor_collection(sample_idx=3, iteration=2, batch_idx=1, sequence_idx=4)
        state = get_tensor_collection_state()
        assert (state.current_rank, state.current_sample_idx, state.current_iteration) == (5, 3, 2)
        assert (state.batch_idx, state.sequence_idx) == (1, 4)
        initialize_tensor_collection(rank=1)
        assert (state.current_rank, state.current_sample_idx, state.current_iteration) == (1, 0, 0)

    def test_torch_distributed(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 9)
        assert get_current_rank_and_sample() == (9, 0)
        set_global_rank(4)
        assert get_current_rank_and_sample() == (4, 0)


class TestSwitch:
    @pytest.mark.parametrize("word", ["0", "false", "No", "OFF"])
    def test_the_environment_says_no(self, monkeypatch, tmp_path, word):
        monkeypatch.setenv("TENSOR_SAVE_ENABLED", word)
        assert save_tensor(torch.ones(1), "linear", "forward", "bf16", "input") is None
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("word", ["1", "true", "Yes", "ON", ""])
    def test_the_environment_says_yes_or_nothing(self, monkeypatch, word):
        monkeypatch.setenv("TENSOR_SAVE_ENABLED", word)
        assert os.path.exists(save_tensor(torch.ones(1), "linear", "forward", "bf16", "input"))

    def test_by_hand_before_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TENSOR_SAVE_ENABLED", "0")
        monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "environment"))
        path = TensorSaver(tmp_path / "hand", enabled=True).save_tensor(
            torch.ones(1), "linear", "forward", "bf16", "input"
        )
        assert Path(path).parent == tmp_path / "hand" / "bf16"

    def test_the_environment_s_directory(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "environment"))
        path = save_tensor(torch.ones(1), "linear", "forward", "bf16", "input")
        assert Path(path).parent == tmp_path / "environment" / "bf16"


class TestGroups:
    def test_linear(self):
        paths = save_linear_tensors(torch.ones(2, 3), torch.ones(4, 3), "mxfp8", layer_idx=1)
        assert list(paths) == ["input", "weight"]
        name = parse_name(os.path.basename(paths["weight"]))
        assert (name.layer_type, name.phase, name.component, name.layer_idx) == ("linear", "pre", "linear", 1)

    def test_attention(self):
        query, key = torch.ones(2, 1, 4, 8), torch.ones(2, 1, 2, 8)
        paths = save_attention_tensors(
            query, key, None, "hifp8", operation="forward", layer_idx=0, rank=1, sample_idx=5
        )
        assert list(paths) == ["query", "key"]
        name = parse_name(os.path.basename(paths["query"]))
        assert (name.component, name.rank, name.sample_idx) == ("FA", 1, 5)
        assert torch.equal(content_of(paths["query"])["tensor"], query)

    def test_switched_off(self, monkeypatch):
        monkeypatch.setenv("TENSOR_SAVE_ENABLED", "0")
        assert save_linear_tensors(torch.ones(1), torch.ones(1), "bf16") == {"input": None, "weight": None}


class TestOwnMetadata:
    def test_further_fields_are_kept(self):
        metadata = {"module": "decoder.layers.0", "formats": {"fprop": {"x": "mxfp8"}}, "note": ("a", 1), "lr": 1e-4}
        path = save_tensor(torch.ones(1), "linear", "forward", "bf16", "input", metadata=metadata)
        kept = content_of(path)["metadata"]
        assert (kept["module"], kept["formats"]) == ("decoder.layers.0", {"fprop": {"x": "mxfp8"}})
        assert (kept["note"], kept["lr"]) == (["a", 1], 1e-4)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"rank": 1}, "metadata may not set rank"),
            ({"x": object()}, r"metadata\['x'\] is a object: give str, int"),
            ({"x": torch.ones(1)}, r"metadata\['x'\] is a Tensor"),
        ],
    )
    def test_what_can_not_be_kept_is_refused(self, tmp_path, metadata, message):
        with pytest.raises(CaptureUsageError, match=message):
            save_tensor(torch.ones(1), "linear", "forward", "bf16", "input", metadata=metadata)
        assert list(tmp_path.iterdir()) == []


class TestRefusals:
    @pytest.mark.parametrize(
        "parts",
        [
            {"quant_type": "../up"},
            {"tensor_name": "a/b"},
            {"layer_type": ""},
            {"operation": "for_ward"},
            {"layer_idx": -1},
            {"rank": -1},
        ],
    )
    def test_parts_that_can_not_be_in_a_name(self, tmp_path, parts):
        call = {"layer_type": "linear", "operation": "forward", "quant_type": "bf16", "tensor_name": "input"}
        with pytest.raises(CaptureUsageError, match=next(iter(parts))):
            save_tensor(torch.ones(1), **(call | parts))
        assert list(tmp_path.iterdir()) == []

    def test_no_tensor_saves_nothing(self, tmp_path):
        assert save_tensor(None, "linear", "forward", "bf16", "input") is None
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_that_is_full(self, monkeypatch, tmp_path):
        def full(file, content):
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("megatron.quantscope.capture.folder.save_tensor_file", full)
        with pytest.raises(CaptureError, match="No space left on device"):
            save_tensor(torch.ones(1), "linear", "forward", "bf16", "input")
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.arange(12).reshape(3, 4).t(),
        torch.ones(2, requires_grad=True) * 3,
        torch.ones(1).expand(1000, 1000),
        torch.tensor([float("nan")]),
    ],
    ids=["0-dim", "empty", "transposed", "in a graph", "expanded", "nan"],
)
def test_odd_tensors(tensor):
    path = save_tensor(tensor, "linear", "forward", "bf16", "input")
    loaded = content_of(path)["tensor"]
    assert loaded.shape == tensor.shape
    assert loaded.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    torch.testing.assert_close(loaded, tensor.detach(), rtol=0, atol=0, equal_nan=True)


def test_what_was_saved_reads_back_as_a_capture():
    save_linear_tensors(torch.ones(2, 3), torch.ones(4, 3), "mxfp8", layer_idx=1)
    capture = open_capture("enhanced_tensor_logs")
    assert capture.problems == []
    assert [(record.tensor_name, record.layer_idx) for record in capture.records] == [("input", 1), ("weight", 1)]


def test_the_api_of_the_design():
    assert get_tensor_saver() is get_tensor_saver()
    assert isinstance(get_tensor_saver(), TensorSaver)
    signature = inspect.signature(save_tensor)
    assert list(signature.parameters) == [
        "tensor",
        "layer_type",
        "operation",
        "quant_type",
        "tensor_name",
        "layer_idx",
        "phase",
        "component",
        "rank",
        "sample_idx",
        "metadata",
    ]
    assert (signature.parameters["phase"].default, signature.parameters["component"].default) == ("unknown", "unknown")
    initialize = inspect.signature(initialize_tensor_collection).parameters
    assert {name: parameter.default for name, parameter in initialize.items()} == {
        "rank": None,
        "sample_idx": None,
        "iteration": 0,
        "batch_idx": 0,
        "sequence_idx": 0,
    }
    assert all(hasattr(tensor_saver, name) for name in tensor_saver.__all__)


def test_importing_it_imports_no_part_of_upstream():
    """megatron-core imports it from inside its own cycle."""
    code = (
        "import sys, types; core = types.ModuleType('megatron.core'); core.__path__ = ['megatron/core']; "
        "sys.modules['megatron.core'] = core; import megatron.core.tensor_saver; "
        "print(sorted(name for name in sys.modules if name.startswith(('megatron.core.', 'torch'))))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "['megatron.core.tensor_saver']\n"
