import numpy as np
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


def viewed(tmp_path, query, key):
    pair = AttentionPair(
        quant_type="bf16",
        layer=0,
        query=Location(save(tmp_path / "q.pt", query)),
        key=Location(save(tmp_path / "k.pt", key)),
        where="",
    )
    return view_attention(pair)


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


def test_what_is_not_query_and_key_gives_no_view(tmp_path):
    assert viewed(tmp_path, torch.ones(4, 1, 3, 8), torch.ones(4, 1, 2, 8)) is None
    assert viewed(tmp_path, torch.ones(4, 8), torch.ones(4, 8)) is None
    (tmp_path / "q.pt").unlink()
    gone = Location(tmp_path / "q.pt")
    assert view_attention(AttentionPair(quant_type="", layer=0, query=gone, key=gone, where="")) is None


def test_pairs_are_the_first_micro_batch_of_each_layer(tables):
    _, summary, details = tables
    pairs = attention_pairs(summary)
    assert [pair.layer for pair in pairs] == [0, 1, 2]
    assert all("query" in pair.query.path.name and "key" in pair.key.path.name for pair in pairs)
    assert pairs[0].where == "iteration 0, micro-batch 0, rank 0"
    assert [view.maps.shape[0] for view in details["attention"]] == [HEADS] * 3
    assert GROUPS < HEADS


def test_files_that_tell_no_iteration_pair_up(tables):
    _, summary, _ = tables
    bare = summary.assign(iteration=np.nan, micro_batch=np.nan, sample_idx=np.nan, rank=np.nan)
    assert [pair.where for pair in attention_pairs(bare)] == ["", "", ""]
