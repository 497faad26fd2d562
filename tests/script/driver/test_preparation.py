from pathlib import Path

import pytest

from script.data.command_line import InputError
from script.data.default import DefaultAssets
from script.driver import preparation
from script.driver.inputs import BadInput
from script.driver.options import COLLECTION, parse
from script.driver.preparation import open_given, prepare


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Stands in for the project's own programs: makes what they would, and records every call."""
    calls = []

    def run(module, *arguments):
        calls.append((module, *arguments))
        output = Path(arguments[arguments.index("--output") + 1])
        if module == "script.model.import_checkpoint":
            output.mkdir(parents=True)
            for name in ("model.json", "tokenizer.json", "latest_checkpointed_iteration.txt"):
                (output / name).touch()
        else:
            for suffix in (".bin", ".idx"):
                output.with_suffix(suffix).touch()

    home = tmp_path / "cache" / "default"
    checkpoint = home / "model"
    checkpoint.mkdir(parents=True)
    for name in ("tokenizer.json", "model.json"):
        (checkpoint / name).touch()
    assets = DefaultAssets(
        checkpoint=checkpoint,
        tokenizer=checkpoint / "tokenizer.json",
        data_prefix=home / "wiki",
        text=home / "articles",
    )
    wikipedia = tmp_path / "wikipedia.xml.bz2"
    wikipedia.touch()
    monkeypatch.setattr(preparation, "_run", run)
    monkeypatch.setattr(preparation, "ensure_default_assets", lambda log: assets)
    monkeypatch.setattr(preparation, "fetch", lambda source, log: wikipedia)
    return calls


def inputs_of(*argv, dtype="bf16"):
    """{flag: value} of the trainer's flags that a command line comes to."""
    flags = prepare(open_given(parse(COLLECTION, ["single", *argv])), dtype, lambda line: None).flags
    pairs = zip(flags, [*flags[1:], "--"], strict=True)
    return {flag: None if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


def test_the_default_needs_no_path(programs, tmp_path):
    inputs = inputs_of()
    assert inputs["--load"] == str(tmp_path / "cache/default/model")
    assert inputs["--data-path"] == str(tmp_path / "cache/default/wiki")
    assert inputs["--tokenizer-type"] == "HuggingFaceTokenizer"
    assert "--use-checkpoint-args" in inputs
    assert programs == []


def test_a_published_model_is_imported_once(programs, tmp_path):
    source = tmp_path / "llama.gguf"
    source.write_bytes(b"weights")
    first = inputs_of("--checkpoint-path", str(source), dtype="fp32")
    assert inputs_of("--checkpoint-path", str(source), dtype="fp32") == first
    (imported, prepared) = programs
    assert imported == ("script.model.import_checkpoint", str(source), "--output", first["--load"], "--dtype", "fp32")
    assert prepared[:2] == ("script.data.prepare_corpus", str(tmp_path / "wikipedia.xml.bz2"))
    assert Path(first["--load"]).parent == tmp_path / "cache" / "imported"
    source.write_bytes(b"other weights")
    assert inputs_of("--checkpoint-path", str(source), dtype="fp32")["--load"] != first["--load"]


def test_text_is_turned_into_tokens_of_the_tokenizer_that_is_used(programs, tmp_path):
    text, tokenizer = tmp_path / "words.txt", tmp_path / "own.json"
    text.touch()
    tokenizer.touch()
    inputs = inputs_of("--data-path", str(text), "--tokenizer-path", str(tokenizer))
    ((module, *arguments),) = programs
    assert module == "script.data.prepare_corpus"
    assert arguments[:3] == [str(text), "--tokenizer", str(tokenizer)]
    assert Path(f"{inputs['--data-path']}.idx").is_file()
    assert inputs["--tokenizer-model"] == str(tokenizer)


def test_token_files_are_taken_as_they_are(programs, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    assert inputs_of("--data-path", str(tmp_path / "corpus.bin"))["--data-path"] == str(tmp_path / "corpus")
    assert programs == []


def test_a_megatron_checkpoint_without_its_architecture(programs, tmp_path):
    for name in ("latest_checkpointed_iteration.txt", "tokenizer.model"):
        (tmp_path / name).touch()
    inputs = inputs_of("--checkpoint-path", str(tmp_path))
    assert "--use-checkpoint-args" not in inputs
    assert inputs["--tokenizer-type"] == "SentencePieceTokenizer"


def test_a_checkpoint_without_tokenizer_is_refused_at_once(programs, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    with pytest.raises(BadInput, match="holds no tokenizer; give one with --tokenizer-path"):
        inputs_of("--checkpoint-path", str(tmp_path))


def test_a_failing_program_is_one_line_and_leaves_nothing(tmp_path):
    text, tokenizer = tmp_path / "words.txt", tmp_path / "tokenizer.json"
    text.write_text("words")
    tokenizer.write_text("no tokenizer")
    given = open_given(parse(COLLECTION, ["--data-path", str(text), "--tokenizer-path", str(tokenizer)]))
    with pytest.raises(InputError, match=r"tokenizer\.json is no tokenizer") as failure:
        preparation._tokens(given.data.path, given.tokenizer, lambda line: None)
    assert "\n" not in str(failure.value)
    assert [path.name for path in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]
