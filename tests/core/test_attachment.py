"""A built model is quantised and captured: what is refused, what is counted, and how often the ranks are asked."""

from argparse import Namespace

import pytest
import torch

from megatron.core import attachment
from megatron.core.resolution import resolve
from megatron.quantscope.capture import CaptureConfig, TensorFilter
from megatron.quantscope.gemm import QuantConfig

LAYERS = 2
MODULES_A_LAYER = 5  # linear_qkv, core_attention, linear_proj, linear_fc1, linear_fc2
RECIPE = QuantConfig(quant_type="mxfp8")


@pytest.fixture
def attach(build_model, tmp_path):
    """`attach(*words, recipe)` -> (session, places) of a new model and a capture with these words of a filter."""
    sessions = []

    def attached(*words, recipe=RECIPE, **options):
        capture = CaptureConfig(enabled=True, directory=tmp_path / "logs", filter=TensorFilter.parse(words))
        arguments = Namespace(num_layers=LAYERS)
        session, places = attachment.attach(
            arguments, [build_model()], recipe, capture, compute_dtype=torch.float32, **options
        )
        sessions.append(session)
        return session, places

    yield attached
    for session in sessions:
        session.close()


@pytest.fixture
def other_rank(monkeypatch):
    """`other_rank(sites)`: a second rank that keeps tensors at so many places."""

    def joined(sites):
        def gather(everyone, ours):
            everyone[:] = [ours, sites if isinstance(ours, int) else []]

        monkeypatch.setattr(attachment.dist, "all_gather_object", gather)

    return joined


@pytest.mark.parametrize("recipe", [RECIPE, QuantConfig()])
@pytest.mark.parametrize(("words", "places"), [((), LAYERS * MODULES_A_LAYER), (("layers=1", "modules=linear_*"), 4)])
def test_what_is_kept_is_counted_whatever_is_quantised(attach, recipe, words, places):
    session, found = attach(*words, recipe=recipe)
    assert (found, session.sites) == (places, places)


@pytest.mark.parametrize("words", [("layers=9",), ("modules=linear_fc3",), ("ranks=1",)])
def test_a_filter_that_keeps_nothing_is_refused_and_leaves_nothing_behind(attach, tmp_path, words):
    with pytest.raises(ValueError, match=r"^--tensor-filter matches no module of the model: no tensor would be kept$"):
        attach(*words)
    assert not list((tmp_path / "logs").rglob("*.json*"))


def test_one_rank_alone_may_keep_nothing(attach, other_rank):
    other_rank(3)
    session, places = attach("layers=9")
    assert (session.sites, places) == (0, 3)


def test_modules_that_are_known_are_not_asked_for_again(attach, build_model, monkeypatch):
    asked = []
    monkeypatch.setattr(attachment, "resolve", lambda *_: asked.append(1) or modules)
    modules = resolve(RECIPE, [build_model()], LAYERS)
    attach(modules=modules)
    assert asked == []
    attach()
    assert asked == [1]
