"""Micro-batches: their order, their samples' places in the stream, and data of another vocabulary."""

import itertools

import pytest
import torch

from megatron.training.data.batches import micro_batches
from megatron.training.failure import TrainingError

LENGTH = 4


class Counting(torch.utils.data.Dataset):
    """Sample n holds the tokens n, n + 1, ..."""

    def __init__(self, length, documents=None):
        self.length = length
        self.documents = documents

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        tokens = torch.arange(index, index + LENGTH)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(LENGTH), "sample_index": index}


@pytest.fixture
def read(parse, monkeypatch):
    """`read(length, rank=.., ranks=.., consumed=.., vocabulary=.., **changes)` -> iterator of micro-batches.

    `dataset=..` reads that one, `share=(rank, ranks)` as one of the context parallel ranks.
    """
    from megatron.core import parallel_state

    def start(length, *, rank=0, ranks=1, consumed=0, vocabulary=1000, dataset=None, share=(0, 1), **changes):
        args = parse(**changes)
        args.padded_vocab_size = vocabulary
        args.context_parallel_size = share[1]
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: share[0])
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: rank)
        monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: ranks)
        return micro_batches(args, dataset or Counting(length), consumed=consumed)

    return start


@pytest.mark.parametrize(("rank", "expected"), [(0, [[0, 1], [4, 5]]), (1, [[2, 3], [6, 7]])])
def test_ranks_read_their_shares(read, rank, expected):
    batches = list(itertools.islice(read(8, rank=rank, ranks=2, micro_batch_size=2), 2))
    assert [batch.sample_indices for batch in batches] == expected
    for batch in batches:
        first = torch.tensor(batch.sample_indices)[:, None]
        assert torch.equal(batch.tokens, first + torch.arange(LENGTH))
        assert torch.equal(batch.labels, batch.tokens + 1)
        assert batch.loss_mask.shape == (2, LENGTH)
        assert (batch.position_ids, batch.attention_mask) == (None, None)


def test_resume_starts_at_the_samples_consumed(read):
    assert next(read(8, consumed=5)).sample_indices == [5]


def test_samples_are_used_up(read):
    data = read(3, micro_batch_size=2)
    assert next(data).sample_indices == [0, 1]
    with pytest.raises(TrainingError, match="the 3 samples of the data are used up"):
        next(data)


@pytest.mark.parametrize(("vocabulary", "good"), [(7, 3), (LENGTH + 1, 1), (LENGTH, 0)])
def test_token_outside_of_the_vocabulary(read, vocabulary, good):
    data = read(8, vocabulary=vocabulary)
    assert [next(data).sample_indices for _ in range(good)] == [[n] for n in range(good)]
    with pytest.raises(TrainingError) as caught:
        next(data)  # the last label of sample n is n + LENGTH
    assert str(caught.value) == (
        f"the data has token {vocabulary}, the model's vocabulary has {vocabulary}; was the data made with this "
        "tokenizer?"
    )


class Negative(Counting):
    """The first token of every sample is one that fell out of its dtype's range."""

    def __getitem__(self, index):
        samples = super().__getitem__(index)
        samples["tokens"][0] = -3
        return samples


def test_a_negative_token(read):
    with pytest.raises(TrainingError) as caught:
        next(read(8, dataset=Negative(8)))
    assert str(caught.value) == (
        "the data has token -3, the model's vocabulary has 1000; was the data made with this tokenizer?"
    )


def test_a_stage_that_reads_nothing(parse):
    assert list(micro_batches(parse(), None, consumed=0)) == []


def test_reading_moves_no_random_state(read):
    before = torch.get_rng_state()
    next(read(8))
    assert torch.equal(torch.get_rng_state(), before)


class OddAndEven:
    """Says that sample n is of the documents n and 2 n."""

    def of(self, index):
        return (index, 2 * index)


def test_samples_bring_their_documents_where_tensors_are_kept(read):
    dataset = Counting(8, OddAndEven())
    batch = next(read(8, dataset=dataset, consumed=2, micro_batch_size=2, save_tensors=True))
    assert batch.document_ids == ((2, 4), (3, 6))
    assert next(read(8, dataset=dataset)).document_ids == ()
    assert next(read(8, save_tensors=True)).document_ids == ()


class Masked(Counting):
    """Sample n counts its first n tokens, and has a mask whose elements say where they are."""

    def __getitem__(self, index):
        mask = torch.arange(LENGTH)[None, :, None] * LENGTH + torch.arange(LENGTH)
        counts = (torch.arange(LENGTH) < index).float()
        return super().__getitem__(index) | {"loss_mask": counts, "attention_mask": mask}


def test_context_parallel_ranks_share_each_sequence(read):
    """Chunks of one token: 0 and 3 for the first rank, 1 and 2 for the second; a query still has all its keys."""
    for rank, places in ((0, [0, 3]), (1, [1, 2])):
        batch = next(read(8, dataset=Masked(8), consumed=3, share=(rank, 2)))
        assert batch.sample_indices == [3]
        assert batch.tokens.tolist() == [[3 + place for place in places]]
        assert batch.labels.tolist() == [[4 + place for place in places]]
        assert batch.loss_mask.tolist() == [[float(place < 3) for place in places]]
        assert batch.attention_mask.tolist() == [
            [[[place * LENGTH + key for key in range(LENGTH)] for place in places]]
        ]


@pytest.mark.parametrize(("consumed", "weights"), [(3, (2 / 3, 4 / 3)), (4, (1, 1)), (1, (2, 0)), (0, (0, 0))])
def test_a_share_weighs_what_it_has_of_the_tokens_that_count(read, consumed, weights):
    """The mean over the share, times its weight, averaged over ranks, is the mean over the sequence."""
    batches = [next(read(8, dataset=Masked(8), consumed=consumed, share=(rank, 2))) for rank in (0, 1)]
    assert tuple(batch.loss_weight.item() for batch in batches) == pytest.approx(weights)


def test_nothing_is_weighed_where_tokens_are_counted_or_sequences_whole(read):
    assert next(read(8, dataset=Masked(8), share=(0, 2), calculate_per_token_loss=True)).loss_weight is None
    assert next(read(8, dataset=Masked(8))).loss_weight is None
