"""What each mode keeps of every tensor there may be, in each format; against NumPy."""

import numpy as np
import pytest
import torch

from megatron.quantscope.capture import CaptureError
from tests.quantscope.capture.conftest import (
    MODES,
    ODD_TENSORS,
    ROWS_A_PASS,
    bits,
    block_exponents,
    linear_tensors,
    manifest_of,
    read,
    run_folder,
    run_iteration,
)

REAL = {name: make for name, make in ODD_TENSORS.items() if not make().is_complex()}


def numbers_of(tensor):
    """The finite values in float64."""
    values = tensor.detach().to(torch.float64).numpy().reshape(-1)
    return values[np.isfinite(values)]


@pytest.mark.parametrize("save_format", ["pt", "segment"])
@pytest.mark.parametrize("mode", MODES)
class TestModes:
    def kept(self, open_session, tensor, mode, save_format):
        session = open_session(mode=mode, save_format=save_format)
        run_iteration(session, 0, tensors=dict.fromkeys(linear_tensors(), tensor))
        capture = read(session)
        assert session.failed is None
        assert len(capture.records) == ROWS_A_PASS
        return session, capture

    @pytest.mark.parametrize("make", ODD_TENSORS.values(), ids=ODD_TENSORS.keys())
    def test_every_tensor(self, open_session, make, mode, save_format):
        tensor = make()
        session, capture = self.kept(open_session, tensor, mode, save_format)
        row = manifest_of(session, "tensor")[0]
        record = capture.records[0]
        assert (record.dtype, record.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if mode == "statistics":
            assert (row["store"], row["file"], row["offset"], row["bytes"], row["checksum"]) == (
                *("none", None, None, 0),
                None,
            )
            with pytest.raises(CaptureError, match="only its statistics were kept"):
                capture.load(record)
        else:
            assert row["store"] == save_format
            assert torch.equal(bits(capture.load(record)), bits(tensor))
        if tensor.is_complex():
            assert record.statistics is record.blocks is None
            return
        statistics, finite = record.statistics, numbers_of(tensor)
        assert statistics.count == tensor.numel()
        assert statistics.zero == int((finite == 0).sum())
        assert (statistics.min, statistics.max) == ((finite.min(), finite.max()) if finite.size else (None, None))
        if mode == "tensors":
            assert record.blocks is None
        else:
            expected = block_exponents(tensor)
            assert torch.equal(capture.block_exponents(record), expected)
            values, counts = np.unique(expected.numpy(), return_counts=True)
            assert row["blocks"]["counts"] == {str(v): int(n) for v, n in zip(values, counts, strict=True)}

    def test_which_files_there_are(self, open_session, mode, save_format):
        session, _ = self.kept(open_session, torch.ones(40), mode, save_format)
        pt = len(list(session.config.directory.rglob("*.pt")))
        segments = len(list(run_folder(session).glob("*.safetensors")))
        in_pt = mode != "statistics" and save_format == "pt"
        assert pt == (6 if in_pt else 0)
        assert segments == (0 if mode == "tensors" and in_pt else 1)


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_those_of_the_moment(open_session, mode):
    """Also where no copy is made: what is written over later was measured before."""
    session, tensor = open_session(mode=mode), torch.ones(64)
    site = session.site(module="fc", layer_type="linear", component="linear", layer_idx=0, formats={})
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    site.tap()("forward", "pre", "input", tensor)
    tensor.fill_(100.0)
    site.tap()("forward", "post", "output", tensor)
    session.end_iteration({})
    capture = read(session)
    assert [record.statistics.amax for record in capture.records] == [1.0, 100.0]
    if mode != "tensors":
        assert [capture.block_exponents(record).tolist() for record in capture.records] == [[127, 127], [133, 133]]


def test_statistics_mode_copies_nothing(open_session, monkeypatch):
    session = open_session(mode="statistics")

    def refuse(*args):
        raise AssertionError("a copy")

    monkeypatch.setattr(session._sink._snapshots, "take", refuse)
    run_iteration(session, 0)
    assert len(read(session).records) == ROWS_A_PASS
