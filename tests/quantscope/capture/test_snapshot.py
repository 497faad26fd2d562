"""Copies: independent of the original, dense, of its very bits, and in memory that is given back."""

import pytest
import torch

from megatron.quantscope.capture import CaptureError
from megatron.quantscope.capture.arena import ALIGNMENT, HostArena
from megatron.quantscope.capture.snapshot import Snapshots, dense_copy, size_of
from tests.quantscope.capture.conftest import ODD_TENSORS, bits

ROOM = 1 << 20


@pytest.fixture
def arena():
    return HostArena(ROOM)


@pytest.mark.parametrize("make", ODD_TENSORS.values(), ids=ODD_TENSORS.keys())
class TestCopies:
    def test_in_leased_memory(self, arena, make):
        tensor = make()
        copy = Snapshots(arena).take(tensor)
        self.check(copy.tensor, tensor)
        assert copy.wait is None
        assert copy.lease.size == size_of(tensor)
        assert copy.tensor.data_ptr() % ALIGNMENT == 0

    def test_in_memory_of_its_own(self, make):
        tensor = make()
        copy = dense_copy(tensor)
        self.check(copy, tensor)
        assert copy.untyped_storage().nbytes() == size_of(tensor)  # a file of it holds nothing else

    def check(self, copy, tensor):
        assert type(copy) is torch.Tensor
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(bits(copy), bits(tensor))
        assert copy.is_contiguous()
        assert not copy.requires_grad
        assert not copy.is_conj()
        assert not copy.is_neg()
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


def test_a_file_of_a_leased_copy_holds_nothing_else(arena, tmp_path):
    """torch.save writes whole storages: a view of the arena would drag all of it along."""
    snapshots = Snapshots(arena)
    first = snapshots.take(torch.zeros(1000))
    second = snapshots.take(torch.ones(3))
    torch.save(second.tensor, tmp_path / "t.pt")
    assert (tmp_path / "t.pt").stat().st_size < 2000 < size_of(first.tensor)


def test_what_happens_to_the_original_later_does_not_show(arena):
    tensor = torch.arange(5.0)
    copy = Snapshots(arena).take(tensor).tensor
    tensor.zero_()
    del tensor
    assert copy.tolist() == [0, 1, 2, 3, 4]


def test_copies_do_not_touch_each_other(arena):
    snapshots = Snapshots(arena)
    copies = [snapshots.take(torch.full((number,), float(number))) for number in range(1, 40)]
    for number, copy in enumerate(copies, start=1):
        assert copy.tensor.tolist() == [float(number)] * number


def test_memory_is_used_again(arena):
    snapshots = Snapshots(arena)
    addresses = set()
    for number in range(10):
        copy = snapshots.take(torch.full((100,), float(number)))
        assert copy.tensor.tolist() == [float(number)] * 100
        addresses.add(copy.tensor.data_ptr())
        copy.lease.give_back()
    assert len(addresses) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch calls both of these beta or old
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["coo", "csr", "meta", "quantized"],
)
def test_tensors_that_are_not_dense_are_refused_and_take_no_room(arena, make, kind):
    for copy in (Snapshots(arena).take, dense_copy):
        with pytest.raises(CaptureError, match=f"a {kind} tensor can not be kept"):
            copy(make())
    assert arena.peak_bytes == 0


def test_a_copy_that_fails_gives_its_memory_back(arena, monkeypatch):
    def broken(self, source):
        raise RuntimeError("no")

    monkeypatch.setattr(torch.Tensor, "copy_", broken)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            Snapshots(arena).take(torch.zeros(ROOM // 4))
    assert arena.take(ROOM).offset == 0  # all of it is free
