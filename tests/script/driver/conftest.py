"""A driver that runs in this environment, with a trainer that is not one."""

import sys
from pathlib import Path

import pytest

from script.driver import environment, trainer

FAKE_TRAINER = Path(__file__).with_name("fake_trainer.py")


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path, monkeypatch):
    """The present environment is the one to run in; cache and variables are the test's own."""
    monkeypatch.setenv(environment.INTERPRETER_VARIABLE, sys.executable)
    monkeypatch.setenv("QUANTSCOPE_CACHE", str(tmp_path / "cache"))
    for name in ("TENSOR_SAVE_DIR", "CUSTOM_QUANT_TYPE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fake_trainer(monkeypatch):
    """Sets how the fake trainer behaves; it runs in place of the real one."""
    monkeypatch.setattr(trainer, "TRAINER", FAKE_TRAINER)

    def behave(name: str) -> None:
        monkeypatch.setenv("FAKE_TRAINER", name)

    return behave
