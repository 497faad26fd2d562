"""The order of samples, against a stream that is dealt out by hand."""

import pytest

from megatron.training.data.samplers import SequentialSampler


def dealt(total, consumed, micro_batch_size, ranks):
    """[rank][micro-batch] -> samples: the rest of the stream, dealt like cards; what does not go round stays."""
    stream = list(range(consumed, total))
    hands = [[] for _ in range(ranks)]
    while len(stream) >= micro_batch_size * ranks:
        for hand in hands:
            hand.append([stream.pop(0) for _ in range(micro_batch_size)])
    return hands


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
@pytest.mark.parametrize(("total", "consumed"), [(0, 0), (1, 0), (48, 0), (50, 0), (50, 12), (50, 50), (50, 80)])
def test_each_rank_reads_its_share(total, consumed, micro_batch_size, ranks):
    for rank, hand in enumerate(dealt(total, consumed, micro_batch_size, ranks)):
        sampler = SequentialSampler(
            total=total, consumed=consumed, micro_batch_size=micro_batch_size, rank=rank, ranks=ranks
        )
        assert list(sampler) == hand
        assert len(sampler) == len(hand)
        assert [sampler.sample_indices(number) for number in range(len(hand))] == hand


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_iteration_reads_the_same_samples_on_any_number_of_ranks(ranks):
    batch, micro_batch_size = 8, 2
    micro_batches = batch // (micro_batch_size * ranks)
    shares = [
        list(SequentialSampler(total=80, consumed=0, micro_batch_size=micro_batch_size, rank=rank, ranks=ranks))
        for rank in range(ranks)
    ]
    for iteration in range(10):
        steps = slice(iteration * micro_batches, (iteration + 1) * micro_batches)
        read = sorted(index for share in shares for micro_batch in share[steps] for index in micro_batch)
        assert read == list(range(iteration * batch, (iteration + 1) * batch))


def test_resume_goes_on_where_the_run_stopped():
    options = {"total": 100, "micro_batch_size": 3, "rank": 1, "ranks": 2}
    whole = list(SequentialSampler(consumed=0, **options))
    assert list(SequentialSampler(consumed=5 * 6, **options)) == whole[5:]


def test_resume_on_other_ranks_leaves_out_and_repeats_nothing():
    before = [index for rank in range(2) for index in range(rank, 24, 2)]
    after = [
        index
        for rank in range(3)
        for micro_batch in SequentialSampler(total=60, consumed=24, micro_batch_size=2, rank=rank, ranks=3)
        for index in micro_batch
    ]
    assert sorted(before + after) == list(range(60))
