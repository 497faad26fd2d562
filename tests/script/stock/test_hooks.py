"""What the wrappers of Megatron-LM's functions tell the session, and when they end the training."""

from types import SimpleNamespace

import pytest

from megatron.core import parallel_state
from megatron.quantscope.capture import CaptureConfig, CaptureError
from megatron.quantscope.gemm import QuantConfig
from script.stock import hooks
from script.stock.flags import UsageError

MICRO_BATCHES = 2


class Session:
    """A session that notes what it is told."""

    def __init__(self, *, finished=False, failed=None):
        self.told, self.finished, self.failed = [], finished, failed
        self.config = SimpleNamespace(directory="there", stop_on_error=True)

    def begin_iteration(self, iteration):
        self.told.append(("iteration", iteration))

    def begin_micro_batch(self, number, samples, *, grad_scale):
        self.told.append((number, list(samples), grad_scale))

    def end_iteration(self, scalars):
        self.told.append(scalars)

    def close(self):
        self.told.append("closed")

    def summary(self):
        return SimpleNamespace(files=1, bytes=2, rows=3, iterations=4)


@pytest.fixture
def args(monkeypatch):
    """Megatron-LM's arguments, of data parallel rank 1 of 2."""
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 2)
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda **_: 1)
    values = {"fp16": False, "loss_scale": None, "calculate_per_token_loss": False, "save": None, "save_interval": None}
    args = SimpleNamespace(curr_iteration=7, consumed_train_samples=100, micro_batch_size=3, **values)
    monkeypatch.setattr(hooks, "_args", lambda: args)
    return args


@pytest.fixture
def instruments():
    """`instruments(session)` as after the model was built."""

    def make(session):
        made = hooks.Instruments(QuantConfig(), CaptureConfig())
        made._session = session
        return made

    return make


OPTIMIZER = SimpleNamespace(param_groups=[{"lr": 0.5}], get_loss_scale=lambda: 8.0)


def train_step(forward_step, data, model, optimizer, scheduler, *, iteration):
    for _ in range(MICRO_BATCHES):
        for chunk in model:
            forward_step(data, chunk)
    return {"lm loss": 2.0}, 0, False, False, 0, 1.5, None


def test_a_step_with_two_chunks(args, instruments):
    session = Session()
    step = instruments(session)._telling(train_step)
    step(lambda data, model: None, None, [object(), object()], OPTIMIZER, None, iteration=7)
    first = (0, [103, 104, 105], 2)
    second = (1, [109, 110, 111], 2)
    scalars = {"lm loss": 2.0, "grad norm": 1.5, "learning rate": 0.5}
    assert session.told == [("iteration", 7), first, first, second, second, scalars]


def test_the_gradient_scale_knows_the_loss_scale(args, instruments):
    args.fp16, args.calculate_per_token_loss = True, True
    session = Session()
    instruments(session)._telling(train_step)(lambda *_: None, None, ["chunk"], OPTIMIZER, None, iteration=7)
    assert [told[2] for told in session.told if isinstance(told, tuple) and len(told) == 3] == [8.0, 8.0]


def test_without_a_session_the_step_is_theirs(instruments):
    step = instruments(None)._telling(train_step)
    assert step(lambda *_: None, None, ["chunk"], OPTIMIZER, None, iteration=7)[0] == {"lm loss": 2.0}


@pytest.mark.parametrize(
    ("session", "upstream", "ends"),
    [(None, False, False), (Session(), False, False), (Session(finished=True), False, True), (Session(), True, True)],
)
def test_training_ends_when_all_is_collected(args, instruments, session, upstream, ends):
    decide = instruments(session)._ending(lambda *_: upstream)
    assert decide("model", "optimizer", "scheduler", 4, 0, {}, None) is ends


def test_a_checkpoint_is_saved_at_that_end_unless_it_just_was(args, instruments, monkeypatch):
    saved = []
    trainer = SimpleNamespace(save_checkpoint_and_time=lambda *a, **_: saved.append(a[0]))
    monkeypatch.setattr(hooks.importlib, "import_module", lambda name: trainer)
    args.save, args.save_interval = "there", 4
    decide = instruments(Session(finished=True))._ending(lambda *_: False)
    assert [decide("model", "optimizer", "scheduler", iteration, 0, {}, None) for iteration in (4, 5)] == [True, True]
    assert saved == [5]


def test_closing_says_what_was_kept_once_and_raises_what_ended_it(instruments, capsys):
    made = instruments(Session(failed="the disk is full"))
    with pytest.raises(CaptureError, match="the disk is full"):
        made.close()
    made.close()
    assert capsys.readouterr().out.count("kept 1 files") == 1


def test_a_function_that_is_not_there_is_named(monkeypatch):
    module = SimpleNamespace(__file__="training.py")
    monkeypatch.setattr(hooks.importlib, "import_module", lambda name: module)
    with pytest.raises(UsageError, match=r"training\.py has no train_step, which instrument\.py wraps"):
        hooks.wrap("training.train_step", lambda upstream: upstream)
