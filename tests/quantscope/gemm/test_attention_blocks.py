import pytest
import torch

from megatron.quantscope.gemm import attention_blocks
from megatron.quantscope.gemm.attention_blocks import ScoreMask, score_blocks

CPU = torch.device("cpu")


def score_mask(s_q: int, s_k: int | None = None, **options) -> ScoreMask:
    defaults = {"heads": 2, "causal": True, "mask": None, "query_positions": None, "key_positions": None}
    return ScoreMask(s_q=s_q, s_k=s_q if s_k is None else s_k, **(defaults | options))


@pytest.mark.parametrize("limit", [1, 1024, 32 * 200, 3 * 200 * 200, 1 << 20])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_cover_every_score_that_is_seen_once(limit, causal, monkeypatch):
    monkeypatch.setattr(attention_blocks, "CPU_BLOCK_ELEMENTS", limit)
    mask = score_mask(200, causal=causal)
    times = torch.zeros(5, 200, 200, dtype=torch.int64)
    for block in score_blocks(5, mask, CPU):
        times[block.heads, block.rows, : block.keys] += 1
        heads, rows = block.heads.stop - block.heads.start, block.rows.stop - block.rows.start
        assert block.rows.start % 32 == 0
        assert heads == 1 or rows == 200
        assert heads * rows * block.keys <= max(limit, 32 * 200)
        assert (block.is_first, block.is_last) == (block.rows.start == 0, block.rows.stop == 200)
    seen = torch.ones(200, 200, dtype=torch.bool).tril() if causal else torch.ones(200, 200, dtype=torch.bool)
    assert (times <= 1).all()
    assert (times[:, seen] == 1).all()


def test_causal_rows_need_about_half_of_the_keys(monkeypatch):
    monkeypatch.setattr(attention_blocks, "CPU_BLOCK_ELEMENTS", 32 * 512)
    blocks = list(score_blocks(1, score_mask(512), CPU))
    assert [block.keys for block in blocks] == list(range(32, 513, 32))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"mask": torch.zeros(64, 64, dtype=torch.bool)},
        {"query_positions": torch.arange(64)},
        {"key_positions": torch.arange(64)},
    ],
)
def test_all_keys_are_needed_where_the_mask_is_not_plainly_causal(options):
    assert score_mask(64, **options).keys_seen(32) == 64
    assert score_mask(64).keys_seen(32) == 32
    assert score_mask(40).keys_seen(33) == 40


@pytest.mark.parametrize("shape", [(8, 8), (1, 8), (8,), (1, 1, 8, 8), (3, 1, 8, 8), (3, 1, 1, 8)])
def test_any_broadcastable_mask_hides_the_same_in_blocks(shape, monkeypatch):
    samples, heads = 3, 2
    given = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4
    whole = given.expand(samples, 1, 8, 8).expand(samples, heads, 8, 8).reshape(samples * heads, 8, 8)
    for causal in (True, False):
        mask = score_mask(8, mask=given, causal=causal)
        expected = whole | torch.ones(8, 8, dtype=torch.bool).triu(1) if causal else whole
        for block in score_blocks(samples * heads, mask, CPU):
            hidden = mask.hidden(block, CPU).expand(samples * heads, 8, 8)
            assert torch.equal(hidden, expected[block.heads, block.rows, : block.keys])


def test_positions_decide_what_is_later():
    mask = score_mask(2, 4, query_positions=torch.tensor([2, 1]), key_positions=torch.tensor([0, 3, 1, 2]))
    (block,) = score_blocks(1, mask, CPU)
    assert mask.hidden(block, CPU)[0].tolist() == [[False, True, False, False], [False, True, False, True]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"s_q": 3, "s_k": 4}, "causal attention of 3 queries and 4 keys needs query_positions and key_positions"),
        ({"s_q": 3, "query_positions": torch.arange(4)}, r"query_positions has shape \[4\]; it must be \[3\]"),
        ({"s_q": 3, "key_positions": torch.zeros(3, 1)}, r"key_positions has shape \[3, 1\]; it must be \[3\]"),
        ({"s_q": 3, "mask": torch.zeros(3, 3)}, "the mask is torch.float32; it must be torch.bool"),
    ],
)
def test_bad_masks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        score_mask(**arguments)
