"""Import through the real path, and the imported GPTModel's logits against a plain forward of another hand."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from script.data.command_line import InputError
from script.data.encoders import load_encoder
from script.model.evaluate_loss import load_model
from script.model.import_checkpoint import import_checkpoint, main
from script.model.single_process import model_parallel

IDS = [(7 * index) % 296 for index in range(24)]


def logits(checkpoint, dtype="fp32"):
    """[tokens, vocab] of megatron-core's GPTModel."""
    with model_parallel(), torch.no_grad():
        model = load_model(checkpoint, dtype).eval()
        output = model(torch.tensor([IDS]), torch.arange(len(IDS))[None], None)
        return output[0].float().numpy().astype(np.float64)


@pytest.fixture
def write(request, write_gguf, write_hf):
    return {"interleaved": write_gguf, "half": write_hf}


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("tie", [False, True])
def test_logits_agree_with_a_plain_forward(tiny, write, reference, tmp_path, layout, tie):
    shape = replace(tiny, tied=tie)
    source, weights = write[layout](shape)
    import_checkpoint(source, tmp_path / "out", dtype="fp32")
    ours, plain = logits(tmp_path / "out"), reference(weights, shape, IDS, layout)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=2e-4 * np.abs(plain).max())
    # The other layout is no near miss: the comparison above can tell.
    other = reference(weights, shape, IDS, "half" if layout == "interleaved" else "interleaved")
    assert np.abs(ours - other).max() > 0.05 * np.abs(plain).max()


def test_quantised_weights_are_imported_as_they_decode(tiny, write_gguf, reference, tmp_path):
    import gguf

    source, weights = write_gguf(tiny, quantise="Q8_0")
    kind = gguf.GGMLQuantizationType.Q8_0
    decoded = {
        key: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
        if isinstance(key, tuple) and value.ndim == 2
        else value
        for key, value in weights.items()
    }
    import_checkpoint(source, tmp_path / "out", dtype="fp32")
    plain = reference(decoded, tiny, IDS, "interleaved")
    np.testing.assert_allclose(logits(tmp_path / "out"), plain, rtol=0, atol=2e-4 * np.abs(plain).max())


def test_what_is_written(tiny, write_gguf, tmp_path):
    source, _ = write_gguf(tiny)
    import_checkpoint(source, tmp_path / "out", dtype="bf16")
    out = tmp_path / "out"
    assert (out / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    assert (out / "release").is_dir()
    architecture = json.loads((out / "model.json").read_text())
    assert architecture["num_query_groups"] == 2
    assert architecture["kv_channels"] == 16
    assert architecture["rotary_base"] == 5000.0
    assert architecture["vocab_size"] == 296
    assert architecture["untie_embeddings_and_output_weights"] is True
    text = "the 12 and"
    assert load_encoder(str(out)).encode_batch([text]) == load_encoder(str(source)).encode_batch([text])
    assert load_encoder(str(out)).eod == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_weights_are_rounded_to_the_dtype_and_no_further(tiny, write_hf, tmp_path):
    source, weights = write_hf(tiny)
    import_checkpoint(source, tmp_path / "out", dtype="bf16")
    with model_parallel():
        model = load_model(tmp_path / "out", "fp32")
    expected = torch.from_numpy(weights["down", 1]).bfloat16().float()
    assert torch.equal(dict(model.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"], expected)


def test_tokenizer_files_of_a_directory_are_kept(tiny, write_hf, tmp_path):
    source, _ = write_hf(tiny)
    (source / "tokenizer.json").write_text('{"model": {}}')
    (source / "tokenizer_config.json").write_text("{}")
    import_checkpoint(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"model": {}}'
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"


def test_a_model_without_a_tokenizer_is_imported_and_says_so(tiny, write_gguf, tmp_path, caplog):
    source, _ = write_gguf(tiny, tokenizer=False)
    import_checkpoint(source, tmp_path / "out")
    assert "no tokenizer is written: " in caplog.text
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "model.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported, only 'llama'"),
        ({"block_count": 3}, r"the tensor blk\.2\.attn_norm\.weight is missing"),
        ({"feed_forward_length": 60}, r"tiny\.gguf: gate of layer 0 has the shape"),
    ],
)
def test_a_failure_leaves_nothing_new_and_loses_nothing(tiny, write_gguf, tmp_path, change, message):
    good, _ = write_gguf(tiny)
    import_checkpoint(good, tmp_path / "out", dtype="fp32")
    before = logits(tmp_path / "out")
    bad, _ = write_gguf(tiny, **change)
    with pytest.raises(InputError, match=message) as caught:
        import_checkpoint(bad, tmp_path / "out", dtype="fp32")
    assert str(bad) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]
    np.testing.assert_array_equal(logits(tmp_path / "out"), before)


def test_a_missing_tensor_of_shards_is_named(tied, write_hf, tmp_path):
    source, _ = write_hf(tied, shards=3, tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"the tensor lm_head\.weight is missing"):
        import_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_a_checkpoint_is_overwritten(tiny, write_gguf, tmp_path, capsys):
    source, _ = write_gguf(tiny)
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    for extra in ([], ["--overwrite"]):
        with pytest.raises(SystemExit) as exit_:
            main([str(source), "--output", str(full), *extra])
        assert exit_.value.code == 2
        assert "holds something that is no checkpoint of an imported model: precious; choose" in capsys.readouterr().err
    assert main([str(source), "--output", str(tmp_path / "out")]) == 0
    with pytest.raises(SystemExit):
        main([str(source), "--output", str(tmp_path / "out")])
    assert "holds a checkpoint of an imported model already; --overwrite replaces it" in capsys.readouterr().err
    assert main([str(source), "--output", str(tmp_path / "out"), "--overwrite"]) == 0


@pytest.mark.parametrize("foreign", ["iter_0001000/common.pt", "release/notes.txt", "tensorboard/events", "capture.pt"])
def test_a_training_in_the_directory_of_an_import_is_not_replaced(tiny, write_gguf, tmp_path, capsys, foreign):
    source, _ = write_gguf(tiny)
    out = tmp_path / "out"
    import_checkpoint(source, out)
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).write_text("days of work")
    with pytest.raises(SystemExit):
        main([str(source), "--output", str(out), "--overwrite"])
    named = foreign if foreign.startswith("release") else foreign.split("/")[0]
    assert f"no checkpoint of an imported model: {named}; choose" in capsys.readouterr().err
    with pytest.raises(InputError, match=named):
        import_checkpoint(source, out)
    assert (out / foreign).read_text() == "days of work"


@pytest.mark.parametrize("place", [".", "hf", "hf/model.safetensors", "hf/megatron"])
def test_the_model_that_is_read_is_never_replaced(tiny, write_hf, tmp_path, place):
    source, _ = write_hf(tiny)
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"read; choose another directory"):
        import_checkpoint(source, tmp_path / place)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.gguf", "--output", "x"], "no such file or directory: absent.gguf"),
        ([__file__], "--output"),
        ([__file__, "--output", "x", "--dtype", "fp8"], "'fp8' (choose from 'bf16', 'fp16', 'fp32')"),
    ],
)
def test_wrong_usage_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_as_a_program(tmp_path):
    """In a process of its own: quiet, one line for a file that is no model, exit code 1."""
    path = tmp_path / "a.txt"
    path.write_text("text")
    command = [sys.executable, "-m", "script.model.import_checkpoint", str(path), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{path}: neither a .gguf file nor a directory" in done.stderr
    assert not (tmp_path / "out").exists()
