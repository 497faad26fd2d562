"""The command's way out: exit codes, one line a complaint, said by the right ranks."""

import pytest

import megatron.core
from megatron.training import main as command_line
from megatron.training import training
from megatron.training.failure import SharedFailure, TrainingError, UsageError


@pytest.fixture
def end_with(monkeypatch):
    """`end_with(error)`: the run behind the command line ends with `error`."""

    def arrange(error):
        def pretrain(args):
            if error is not None:
                raise error

        monkeypatch.setattr(training, "pretrain", pretrain)
        monkeypatch.setattr(command_line, "GRACE_S", 0.0)

    return arrange


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, ""),
        (UsageError("wrong\ntwice"), 2, "pretrain_gpt.py: error: wrong\npretrain_gpt.py: error: twice\n"),
        (TrainingError("no luck"), 1, "pretrain_gpt.py: error: no luck\n"),
        (SharedFailure("no luck"), 1, "pretrain_gpt.py: error: no luck\n"),
        (KeyboardInterrupt(), 130, "pretrain_gpt.py: error: interrupted\n"),
    ],
)
def test_exit_code_and_line(command, end_with, capsys, error, code, said):
    end_with(error)
    assert command_line.main(command()) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("wrong"), 2, ""),
        (TrainingError("no luck"), 1, "pretrain_gpt.py: error (rank 1): no luck\n"),
        (SharedFailure("no luck"), 1, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_another_rank_says_only_what_it_alone_knows(command, end_with, capsys, monkeypatch, error, code, said):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    end_with(error)
    assert command_line.main(command()) == code
    assert capsys.readouterr().err == said


def test_an_error_of_ours_is_not_hidden(command, end_with):
    end_with(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        command_line.main(command())


def test_another_copy_of_megatron_core_is_refused(command, end_with, capsys, monkeypatch, tmp_path):
    end_with(AssertionError("not reached"))
    monkeypatch.setattr(megatron.core, "__path__", [str(tmp_path)])
    assert command_line.main(command()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"pretrain_gpt.py: error: megatron.core comes from {tmp_path}, not from this checkout")
    assert len(err.splitlines()) == 1
