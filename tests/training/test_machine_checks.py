"""What a machine does not have is said in one line before anything is built."""

import pytest

from megatron.training.checks import MACHINE_CHECKS, check, machine
from megatron.training.main import main

CASES = [
    (
        {"distributed_backend": "nccl"},
        "--distributed-backend nccl needs a GPU and a torch that was built with NCCL; give gloo, or leave it out",
    ),
    ({"record_memory_history": True}, "--record-memory-history records the memory of a GPU, and there is none"),
    ({"profile": True}, "--profile without a GPU writes a trace to --tensorboard-dir or --save: give one"),
]


@pytest.mark.parametrize(("changes", "line"), CASES)
def test_without_a_gpu(command, monkeypatch, capsys, changes, line):
    monkeypatch.setattr(machine, "_has_gpu", lambda: False)
    monkeypatch.setattr("megatron.training.training.initialize", lambda args: pytest.fail("nothing was refused"))
    assert main(command(**changes)) == 2
    assert capsys.readouterr().err == f"pretrain_gpt.py: error: {line}\n"


def test_every_row_has_a_case():
    assert [line for _, line in MACHINE_CHECKS] == [line for _, line in CASES]


@pytest.mark.parametrize("changes", [changes for changes, _ in CASES])
def test_with_a_gpu(parse, monkeypatch, changes):
    monkeypatch.setattr(machine, "_has_gpu", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    check(parse(**changes), MACHINE_CHECKS)


def test_a_torch_without_nccl(parse, monkeypatch):
    monkeypatch.setattr(machine, "_has_gpu", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    is_wrong, _ = MACHINE_CHECKS[0]
    assert is_wrong(parse(distributed_backend="nccl"))


@pytest.mark.parametrize("changes", [{"profile": True, "save": "here"}, {"distributed_backend": "gloo"}, {}])
def test_what_needs_no_gpu(parse, monkeypatch, changes):
    monkeypatch.setattr(machine, "_has_gpu", lambda: False)
    check(parse(**changes), MACHINE_CHECKS)
