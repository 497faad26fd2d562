"""Documents of samples: found through megatron-core's index arrays, compared with what the tokens themselves say."""

import pytest

DOCUMENT, DOCUMENTS = 11, 16  # tokens of a document; so samples of 16 begin and end anywhere in documents
SAMPLES = 40  # more than one epoch
PART = 10000  # from one file's first token to the next one's

pytestmark = pytest.mark.usefixtures("one_rank")


def documents_of(item, before=(0, 0)):
    """The documents that the tokens and the last label come from, whose files have `before` documents before them."""
    tokens = [*item["tokens"].tolist(), item["labels"][-1].item()]
    firsts = [token for place, token in enumerate(tokens) if place == 0 or token % PART % DOCUMENT == 0]
    return tuple(token % PART // DOCUMENT + before[token // PART] for token in firsts)


def assert_found(dataset, before=(0, 0)):
    found = [dataset.documents.of(index) for index in range(SAMPLES)]
    assert found == [documents_of(dataset[index], before) for index in range(SAMPLES)]
    assert all(type(number) is int for numbers in found for number in numbers)
    return found


def test_documents_of_one_file(build_data, corpus):
    prefix = corpus("c", documents=DOCUMENTS, length=DOCUMENT)
    _, data = build_data(data_path=prefix, split="1", train_iters=SAMPLES)
    found = assert_found(data.train)
    assert {len(numbers) for numbers in found} == {2, 3}
    assert {number for numbers in found for number in numbers} == set(range(DOCUMENTS))


def test_a_share_of_a_file_keeps_the_files_numbers(build_data, corpus):
    prefix = corpus("c", documents=DOCUMENTS, length=DOCUMENT)
    _, data = build_data(data_path=prefix, split="8,8", eval_iters=SAMPLES)
    assert {number for numbers in assert_found(data.valid) for number in numbers} == set(range(8, DOCUMENTS))


@pytest.mark.parametrize("weights", [True, False])
def test_the_parts_of_a_blend_are_numbered_through(build_data, corpus, weights):
    prefixes = [corpus(f"{part}", PART * part, DOCUMENTS - part, DOCUMENT) for part in (0, 1)]
    blend = ["1", prefixes[0], "3", prefixes[1]] if weights else prefixes * 3
    _, data = build_data(data_path=blend, split="1", train_iters=SAMPLES)
    numbers = {number for numbers in assert_found(data.train, before=(0, DOCUMENTS)) for number in numbers}
    assert min(numbers) < DOCUMENTS <= max(numbers)


def test_mock_documents_are_those_that_upstream_makes_up(build_data):
    _, data = build_data(mock_data=True, vocab_size=100, train_iters=SAMPLES)
    for index in range(SAMPLES):
        _, numbers = data.train.samples._query_document_sample_shuffle_indices(index)
        assert data.train.documents.of(index) == tuple(numbers)


@pytest.mark.parametrize("kept", [True, False])
def test_a_stage_that_reads_no_tokens_knows_documents_when_tensors_are_kept(build_data, corpus, monkeypatch, kept):
    from megatron.core import parallel_state

    prefix = corpus("c", documents=DOCUMENTS, length=DOCUMENT)
    _, reading = build_data(data_path=prefix, split="1", train_iters=SAMPLES)
    for place in ("first", "last"):
        monkeypatch.setattr(parallel_state, f"is_pipeline_{place}_stage", lambda: False)
    _, data = build_data(data_path=prefix, split="1", train_iters=SAMPLES, save_tensors=kept or None)
    assert data.train[3] == {"sample_index": 3}
    if kept:
        assert [data.train.documents.of(n) for n in range(SAMPLES)] == assert_found(reading.train)
    else:
        assert data.train.documents is None
