import numpy as np
import pandas
import pytest
import torch

from megatron.quantscope.analysis.attention import (
    MAP_SIZE,
    AttentionPair,
    attention_pairs,
    probabilities,
    view_attention,
)
from megatron.quantscope.capture.location import Location
from tests.quantscope.analysis.captures import GROUPS, HEADS, save


def viewed(tmp_path, query=None, key=None, p=None, softmax_scale=None):
    tensors = {"query": query, "key": key, "probabilities": p}
    locations = {
        name: None if tensor is None else Location(save(tmp_path / f"{name}.pt", tensor))
        for name, tensor in tensors.items()
    }
    return view_attention(AttentionPair(quant_type="bf16", layer=0, where="", softmax_scale=softmax_scale, **locations))


def heads_of(count, size, seed):
    return torch.randn(count, 1, size, 8, generator=torch.Generator().manual_seed(seed))


def test_probabilities_are_those_of_torch():
    query, key = (torch.randn(40, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    p, scores = probabilities(query, key, torch.arange(40))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], torch.eye(40)[None], is_causal=True
    )
    torch.testing.assert_close(p, expected[0])
    assert torch.isinf(scores[0, 1:]).all()


def test_heads_read_their_group_and_their_numbers_are_right(tmp_path):
    query = torch.randn(48, 2, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    key = torch.randn(48, 2, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    view = viewed(tmp_path, query, key)
    assert view.maps.shape == (4, 48, 48)
    for head in range(4):
        q, k = query[:, 0, head].double().numpy(), key[:, 0, head // 2].double().numpy()
        scores = np.where(np.tril(np.ones((48, 48), bool)), q @ k.T / np.sqrt(8), -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(view.maps[head], p, atol=1e-6)
        safe = np.where(p > 0, p, 1)
        assert view.entropy_bits[head] == pytest.approx(-(p * np.log2(safe)).sum(axis=1).mean(), rel=1e-4)
        assert view.first_token[head] == pytest.approx(p[1:, 0].mean(), rel=1e-4)
        assert view.largest_score[head] == pytest.approx(np.abs(scores[np.isfinite(scores)]).max(), rel=1e-5)


def test_long_sequences_are_sampled_and_pooled(tmp_path):
    query = torch.randn(700, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    view = viewed(tmp_path, query, query)
    assert view.maps.shape == (1, MAP_SIZE, MAP_SIZE)
    assert view.maps.max() <= 1
    assert np.triu(view.maps[0], 2).max() == 0  # still causal


def test_the_softmax_scale_of_the_run_counts(tmp_path):
    query, key = heads_of(24, 1, 0), heads_of(24, 1, 1)
    scores = (query[:, 0, 0] @ key[:, 0, 0].T * 2.0).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    view = viewed(tmp_path, query, key, softmax_scale=2.0)
    np.testing.assert_allclose(view.maps[0], torch.softmax(scores, 1), atol=1e-6)
    assert view.recomputed


def test_captured_probabilities_are_shown_as_they_are(tmp_path):
    query, key = heads_of(24, 2, 0), heads_of(24, 1, 1)
    p = torch.rand(1, 2, 24, 24, generator=torch.Generator().manual_seed(2)).tril()
    alone, with_scores = viewed(tmp_path, p=p), viewed(tmp_path, query, key, p)
    for view in (alone, with_scores):
        assert not view.recomputed
        np.testing.assert_array_equal(view.maps, p[0])
        np.testing.assert_allclose(view.first_token, p[0, :, 1:, 0].mean(1), rtol=1e-6)
    assert np.isnan(alone.largest_score).all()
    np.testing.assert_array_equal(with_scores.largest_score, viewed(tmp_path, query, key).largest_score)


def test_captured_probabilities_of_another_shape_are_left_out(tmp_path):
    assert viewed(tmp_path, heads_of(4, 2, 0), heads_of(4, 1, 1), torch.ones(2, 4, 4)).recomputed
    assert viewed(tmp_path, p=torch.ones(1, 0, 4, 4)) is None


def test_what_is_not_query_and_key_gives_no_view(tmp_path):
    assert viewed(tmp_path, torch.ones(4, 1, 3, 8), torch.ones(4, 1, 2, 8)) is None
    assert viewed(tmp_path, torch.ones(4, 8), torch.ones(4, 8)) is None
    gone = Location(tmp_path / "gone.pt")
    assert view_attention(AttentionPair(quant_type="", layer=0, query=gone, key=gone, where="")) is None


def test_pairs_are_the_first_micro_batch_of_each_layer(tables):
    _, summary, details = tables
    pairs = attention_pairs(summary)
    assert [pair.layer for pair in pairs] == [0, 1, 2]
    assert all("query" in pair.query.path.name and "key" in pair.key.path.name for pair in pairs)
    assert pairs[0].where == "iteration 0, micro-batch 0, rank 0"
    assert [view.maps.shape[0] for view in details["attention"]] == [HEADS] * 3
    assert GROUPS < HEADS


def test_pairs_take_probabilities_and_their_scale_from_the_same_micro_batch(tables):
    _, summary, _ = tables
    of_attention = (summary["layer_type"] == "attention") & (summary["operation"] == "forward")
    p = summary[of_attention & (summary["tensor_name"] == "query")].assign(tensor_name="attention_probs", file="p.pt")
    later = p.assign(micro_batch=1, sample_idx=1, file="later.pt")
    table = pandas.concat([later, summary, p]).assign(softmax_scale=0.25)
    pairs = attention_pairs(table)
    assert [(pair.probabilities.path.name, pair.softmax_scale) for pair in pairs] == [("p.pt", 0.25)] * 3
    assert all("query" in pair.query.path.name for pair in pairs)
    alone = attention_pairs(p)
    assert [(pair.query, pair.key, pair.probabilities.path.name) for pair in alone] == [(None, None, "p.pt")] * 3


def test_files_that_tell_no_iteration_pair_up(tables):
    _, summary, _ = tables
    assert len(attention_pairs(summary[summary["tensor_name"] != "key"])) == 0
    bare = summary.assign(iteration=np.nan, micro_batch=np.nan, sample_idx=np.nan, rank=np.nan)
    assert [pair.where for pair in attention_pairs(bare)] == ["", "", ""]
