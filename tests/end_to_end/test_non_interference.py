"""Capture never changes a bit of the training: losses, gradients and weights are equal with it on and off."""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.end_to_end.conftest import pretrain

ITERATIONS = 3


def saved_tensors(directory):
    """Every tensor of the checkpoint: weights and Adam's moments, which hold every gradient so far."""
    state = _load_state_dict_from_keys(storage_reader=FileSystemReader(directory / f"iter_{ITERATIONS:07d}"))
    return {key: value for key, value in flatten(state) if torch.is_tensor(value)}


def flatten(tree, prefix=""):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from flatten(value, f"{prefix}{key}.")
        yield f"{prefix}{key}", value


@pytest.mark.parametrize("dtype", ["--bf16", None])
@pytest.mark.parametrize("quant_type", ["none", "mxfp8"])
def test_training_is_bit_identical_with_capture_on_and_off(tmp_path, quant_type, dtype):
    flags = ["--quant-type", quant_type, *([dtype] if dtype else []), "--save-interval", ITERATIONS]
    capture = ["--save-tensors", "--tensor-save-dir", tmp_path / "capture", "--control-iter", 0]
    off = pretrain(*flags, "--save", tmp_path / "off")
    on = pretrain(*flags, "--save", tmp_path / "on", *capture)
    assert len(off.losses) == ITERATIONS
    assert on.losses == off.losses
    plain, captured = saved_tensors(tmp_path / "off"), saved_tensors(tmp_path / "on")
    assert plain.keys() == captured.keys()
    assert any("exp_avg" in key for key in plain)
    for key, value in plain.items():
        assert torch.equal(value, captured[key]), key
