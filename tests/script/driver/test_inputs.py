import pytest

from script.driver.inputs import BadInput, find_tokenizer, open_checkpoint, open_data, open_tokenizer


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["latest_checkpointed_iteration.txt"], "Megatron"),
        (["config.json", "model.safetensors"], "Hugging Face"),
    ],
)
def test_checkpoint_directories(tmp_path, files, kind):
    for name in files:
        (tmp_path / name).touch()
    assert open_checkpoint(tmp_path).kind == kind


def test_checkpoint_file(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert open_checkpoint(tmp_path / "model.gguf").kind == "GGUF"


@pytest.mark.parametrize("name", ["empty", "model.bin"])
def test_no_checkpoint(tmp_path, name):
    path = tmp_path / name
    path.mkdir() if name == "empty" else path.touch()
    with pytest.raises(BadInput, match=rf"{name} holds no checkpoint; allowed: a Megatron directory"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tokenizer.json", "HuggingFaceTokenizer"), ("tokenizer.model", "SentencePieceTokenizer")],
)
def test_tokenizers(tmp_path, name, kind):
    (tmp_path / name).touch()
    assert open_tokenizer(tmp_path / name).kind == kind
    assert find_tokenizer(tmp_path).kind == kind


def test_no_tokenizer(tmp_path):
    (tmp_path / "words.txt").touch()
    assert find_tokenizer(tmp_path) is None
    with pytest.raises(BadInput, match=r"words.txt holds no tokenizer; allowed: a tokenizer.json"):
        open_tokenizer(tmp_path / "words.txt")


def test_data(tmp_path):
    for name in ("wiki.v1.bin", "wiki.v1.idx", "articles.txt", "half.bin"):
        (tmp_path / name).touch()
    for name in ("wiki.v1", "wiki.v1.bin", "wiki.v1.idx"):
        data = open_data(tmp_path / name)
        assert (data.path, data.is_text) == (tmp_path / "wiki.v1", False)
    assert open_data(tmp_path / "articles.txt").is_text
    with pytest.raises(BadInput, match=r"half.bin is there, .*half.idx is missing"):
        open_data(tmp_path / "half")
    with pytest.raises(BadInput, match=r"nowhere is no data; allowed"):
        open_data(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="is no data"):
        open_data(tmp_path)
