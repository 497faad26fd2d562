"""Datasets over small files of megatron-core's own builder, whose tokens say where they come from."""

import pytest
import torch

from megatron.training.data.datasets import samples_needed
from megatron.training.failure import UsageError

LENGTH = 16  # of the samples that `build_data` cuts
pytestmark = pytest.mark.usefixtures("one_rank")


def tokens_of(dataset, count=None):
    return torch.stack([dataset[index]["tokens"] for index in range(count or len(dataset))])


def test_items_are_the_corpus_cut_into_samples(build_data, corpus):
    _, data = build_data(data_path=corpus("c", documents=1, length=10 * LENGTH + 1), split="1", train_iters=10)
    assert len(data.train) >= 10
    for index in range(10):
        item = data.train[index]
        assert item["sample_index"] == index
        start = int(item["tokens"][0])
        assert start % LENGTH == 0
        assert item["tokens"].tolist() == list(range(start, start + LENGTH))
        assert item["labels"].tolist() == list(range(start + 1, start + LENGTH + 1))
        assert item["loss_mask"].tolist() == [1.0] * LENGTH
        assert item["position_ids"].tolist() == list(range(LENGTH))
        assert "attention_mask" not in item
    assert sorted(tokens_of(data.train, 10)[:, 0].tolist()) == [LENGTH * n for n in range(10)]


def test_order_follows_the_seed(build_data, corpus):
    prefix = corpus("c")
    first, again, other = (build_data(data_path=prefix, split="1", train_iters=24, seed=seed)[1] for seed in (1, 1, 2))
    assert torch.equal(tokens_of(first.train, 24), tokens_of(again.train, 24))
    assert not torch.equal(tokens_of(first.train, 24), tokens_of(other.train, 24))


def test_split_keeps_shares_apart(build_data, corpus):
    prefix = corpus("c", documents=20)
    _, data = build_data(data_path=prefix, split="'50,30,20'", train_iters=8, eval_iters=4, eval_interval=100)
    bounds = 33 * 10, 33 * 16, 33 * 20
    train, valid, test = map(tokens_of, (data.train, data.valid, data.test))
    assert train.max() < bounds[0]
    assert bounds[0] <= valid.min()
    assert valid.max() < bounds[1] <= test.min()
    assert test.max() < bounds[2]


def test_nothing_is_built_that_is_not_read(build_data, corpus):
    _, data = build_data(data_path=corpus("c"), split="8,4,4")
    assert (data.valid, data.test) == (None, None)
    _, data = build_data(data_path=corpus("d"), split="8,4,4", eval_iters=1, skip_train=True)
    assert data.train is None
    assert len(data.valid) >= 1
    assert len(data.test) >= 1


@pytest.mark.parametrize(("weights", "share"), [((3, 1), 0.75), (("1e-1", ".3"), 0.25), ((1, 1), 0.5)])
def test_blend_is_weighted(build_data, corpus, weights, share):
    first, second = corpus("first"), corpus("second", first=10000)
    blend = [weights[0], first, weights[1], second]
    _, data = build_data(data_path=blend, split="1", train_iters=80)
    from_first = int((tokens_of(data.train, 80)[:, 0] < 10000).sum())
    assert abs(from_first - 80 * share) <= 1


def test_blend_without_weights_reads_every_part(build_data, corpus):
    prefixes = [corpus(str(part), first=part * 10000) for part in range(3)]
    _, data = build_data(data_path=prefixes, split="1", train_iters=64)
    assert set((tokens_of(data.train, 64)[:, 0] // 10000).tolist()) == {0, 1, 2}
    assert [data.train[index]["sample_index"] for index in (0, 63)] == [0, 63]


def test_files_of_their_own_for_each_purpose(build_data, corpus):
    paths = {f"{name}_data_path": corpus(name, first=n * 10000) for n, name in enumerate(("train", "valid", "test"))}
    _, data = build_data(**paths, eval_iters=2)
    starts = [int(tokens_of(part)[:, 0].min()) // 10000 for part in (data.train, data.valid, data.test)]
    assert starts == [0, 1, 2]


def test_mock_data_needs_no_files(build_data):
    _, data = build_data(mock_data=True, vocab_size=100, eval_iters=1, train_iters=5)
    assert len(data.train) >= 5
    assert [data.train[index]["sample_index"] for index in range(5)] == [0, 1, 2, 3, 4]
    assert tokens_of(data.train, 5).shape == (5, LENGTH)
    assert len(data.valid) >= 1


def test_reading_by_seek_gives_the_same(build_data, corpus):
    prefix = corpus("c")
    _, mapped = build_data(data_path=prefix, split="1", train_iters=6)
    _, by_seek = build_data(data_path=prefix, split="1", train_iters=6, no_mmap_bin_files=True)
    readers = [type(data.train.samples.dataset.bin_reader).__name__ for data in (mapped, by_seek)]
    assert readers == ["_MMapBinReader", "_FileBinReader"]
    assert torch.equal(tokens_of(mapped.train, 6), tokens_of(by_seek.train, 6))


def test_reset_attention_mask_brings_a_mask(build_data, corpus):
    _, data = build_data(data_path=corpus("c"), split="1", reset_attention_mask=True)
    mask = data.train[0]["attention_mask"]
    assert (mask.dtype, mask.shape) == (torch.bool, (1, LENGTH, LENGTH))
    assert mask[0].triu(1).sum() == LENGTH * (LENGTH - 1) // 2  # True: the future is not seen


def test_the_index_is_kept_where_the_flag_says(build_data, corpus, tmp_path):
    build_data(data_path=corpus("c"), split="1", data_cache_path=tmp_path / "elsewhere")
    assert any((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "cache").exists()


class TestRefused:
    def refusal(self, build_data, **changes):
        with pytest.raises(UsageError) as caught:
            build_data(**changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_truncated_tokens(self, build_data, corpus):
        prefix = corpus("c", documents=2)
        with open(f"{prefix}.bin", "r+b") as stream:
            stream.truncate(100)
        assert self.refusal(build_data, data_path=prefix) == (
            f"{prefix}.bin has 100 bytes, its index says 132: it is incomplete; make the data again"
        )

    def test_foreign_index_inside_a_blend(self, build_data, corpus):
        prefix, other = corpus("c"), corpus("other")
        with open(f"{other}.idx", "wb") as stream:
            stream.write(b"not an index, but longer than its header is")
        line = self.refusal(build_data, data_path=["1", prefix, "2", other])
        assert line.startswith(f"{other}.idx is not the index of a Megatron dataset: its first bytes are b'not an in")

    @pytest.mark.parametrize(("documents", "length"), [(0, 0), (4, 0)])
    def test_no_tokens(self, build_data, corpus, documents, length):
        prefix = corpus("c", documents=documents, length=length)
        line = self.refusal(build_data, data_path=prefix, split="1")
        assert line == f"{prefix} holds no tokens for training: --split 1 of {documents} sequences"

    def test_share_of_nothing(self, build_data, corpus):
        prefix = corpus("c", documents=1)
        line = self.refusal(build_data, data_path=prefix, split="1,99", eval_iters=1)
        assert line == f"{prefix} holds no tokens for training: --split 1,99 of 1 sequences"

    def test_nowhere_to_keep_the_index(self, build_data, corpus, tmp_path):
        (tmp_path / "file").touch()
        line = self.refusal(build_data, data_path=corpus("c"), split="1", data_cache_path=tmp_path / "file" / "cache")
        assert line.startswith("the index of the data can not be written: ")
        assert line.endswith("; give --data-cache-path DIR")


def test_evaluation_data_without_tokens_is_left_out(build_data, corpus, capsys):
    prefix = corpus("c", documents=4)
    _, data = build_data(data_path=prefix, split="99,1,0", eval_iters=1)
    assert data.train is not None
    assert (data.valid, data.test) == (None, None)
    line = f"{prefix} holds no tokens for validation: --split 99,1,0 of 4 sequences; there will be no validation\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_iters": 10, "global_batch_size": 4, "eval_iters": 0}, [40, 0, 0]),
        ({"train_iters": 10, "global_batch_size": 4, "eval_iters": 3, "eval_interval": 5}, [40, 36, 12]),
        ({"train_iters": 10, "global_batch_size": 4, "eval_iters": 3, "skip_train": True}, [0, 12, 12]),
        ({"train_iters": None, "train_samples": 10, "global_batch_size": 4, "eval_iters": 0}, [12, 0, 0]),
        ({"train_iters": None, "train_samples": 12, "global_batch_size": 4, "eval_iters": 0}, [12, 0, 0]),
    ],
)
def test_samples_needed(parse, changes, expected):
    assert samples_needed(parse(**changes)) == expected


def test_samples_needed_while_the_batch_grows(parse):
    args = parse(train_iters=None, train_samples=30, global_batch_size=8, rampup_batch_size=[2, 2, 24], eval_iters=0)
    consumed = 0
    while consumed < 30:
        consumed += min(2 + 2 * (consumed * 3 // 24), 8)
    assert consumed <= samples_needed(args)[0] < 30 + 8
