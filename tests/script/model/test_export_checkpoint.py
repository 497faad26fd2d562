"""From Megatron to Hugging Face: the bits of a round trip, logits against transformers, and what is refused."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from script.data.command_line import InputError
from script.model.evaluate_loss import load_model
from script.model.export_checkpoint import export_checkpoint, main, size_in_bytes
from script.model.hf_checkpoint import HuggingFaceCheckpoint
from script.model.import_checkpoint import import_checkpoint
from script.model.megatron_checkpoint import architecture_of
from script.model.single_process import model_parallel

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "checkpoints.md"
IDS = [(7 * index) % 296 for index in range(24)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tensors(directory):
    """Every tensor of a directory, by name, as the library reads them."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same_bits(ours, expected):
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("change", "dtype", "config"),
    [
        ({}, "fp32", {"shards": 3, "rope_scaling": LLAMA3}),
        ({"tied": True, "groups": 4}, "bf16", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"qkv_bias": True}, "fp16", {"model_type": "qwen2"}),
    ],
)
def test_round_trip_from_hugging_face(tiny, write_hf, tmp_path, change, dtype, config):
    source, _ = write_hf(replace(tiny, **change), dtype=DTYPES[dtype], **config)
    import_checkpoint(source, tmp_path / "megatron", dtype=dtype)
    export_checkpoint(tmp_path / "megatron", tmp_path / "out")
    assert_same_bits(tensors(tmp_path / "out"), tensors(source))
    assert HuggingFaceCheckpoint(tmp_path / "out").architecture == HuggingFaceCheckpoint(source).architecture


def test_round_trip_from_megatron(tiny, write_hf, tmp_path):
    """Megatron -> Hugging Face in shards -> Megatron: every parameter of the two models has the same bits."""
    source, _ = write_hf(tiny)
    import_checkpoint(source, tmp_path / "first", dtype="bf16")
    export_checkpoint(tmp_path / "first", tmp_path / "hf", max_shard_bytes=100_000)
    import_checkpoint(tmp_path / "hf", tmp_path / "second", dtype="bf16")
    with model_parallel():
        first, second = (dict(load_model(tmp_path / name, "bf16").named_parameters()) for name in ("first", "second"))
        assert_same_bits(first, second)


def test_shards_and_their_index(tiny, write_hf, tmp_path):
    source, _ = write_hf(tiny)
    import_checkpoint(source, tmp_path / "megatron", dtype="fp32")
    export_checkpoint(tmp_path / "megatron", tmp_path / "out", max_shard_bytes=120_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(5)]
    sizes = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            assert stored.metadata() == {"format": "pt"}
            assert {index["weight_map"][name] for name in stored.keys()} == {file.name}  # noqa: SIM118
            sizes[file.name] = sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 120_000 for size in sizes.values())


THEIRS = """
import json
import sys
import torch
from transformers import AutoModelForCausalLM
for directory in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model(torch.tensor([json.loads(sys.argv[1])])).logits[0]
    torch.save({"logits": logits, "inv_freq": model.model.rotary_emb.inv_freq}, f"{directory}/result.pt")
"""


def of_transformers(ids, *directories):
    """Logits and rotary frequencies, computed offline in a process that knows nothing of our stand-in for CUDA."""
    command = [sys.executable, "-c", THEIRS, str(ids), *map(str, directories)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(directory / "result.pt", weights_only=True) for directory in directories]


def assert_same_model(checkpoint, ids, theirs, tolerance):
    with model_parallel(), torch.no_grad():
        ours = load_model(checkpoint, "fp32").eval()
        logits = ours(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0]
    largest = float(theirs["logits"].abs().max())
    torch.testing.assert_close(logits, theirs["logits"], rtol=0, atol=tolerance * largest)
    torch.testing.assert_close(ours.rotary_pos_emb.inv_freq, theirs["inv_freq"], rtol=1e-6, atol=0)


def test_transformers_computes_the_same(tiny, write_hf, tmp_path):
    """What transformers makes of an export has the logits, and the rotary frequencies, of megatron-core's GPTModel."""
    kinds = {
        "llama": ({"tied": True}, {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
        "qwen2": ({"qkv_bias": True, "head_width": 24}, {"model_type": "qwen2", "head_dim": None}),
    }
    for name, (change, config) in kinds.items():
        source, _ = write_hf(replace(tiny, **change), **config)
        import_checkpoint(source, tmp_path / name, dtype="fp32")
        export_checkpoint(tmp_path / name, tmp_path / f"{name}_out")
    results = of_transformers(IDS, *(tmp_path / f"{name}_out" for name in kinds))
    for name, theirs in zip(kinds, results, strict=True):
        assert_same_model(tmp_path / name, IDS, theirs, 1e-5)


def rewrite(checkpoint, **flags):
    path = checkpoint / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))


def test_padding_of_the_vocabulary_is_cut_off_and_zero_centred_norms_are_shifted(tiny, write_hf, tmp_path):
    source, weights = write_hf(tiny)
    import_checkpoint(source, tmp_path / "megatron", dtype="fp32")
    rewrite(tmp_path / "megatron", vocab_size=290, layernorm_zero_centered_gamma=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "out")
    exported = tensors(tmp_path / "out")
    np.testing.assert_array_equal(exported["lm_head.weight"].numpy(), weights["head"][:290])
    np.testing.assert_array_equal(exported["model.embed_tokens.weight"].numpy(), weights["embedding"][:290])
    np.testing.assert_array_equal(exported["model.norm.weight"].numpy(), weights["final_norm"] + np.float32(1))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 290


def test_interleaved_rotary_rows_are_reordered(tiny, write_gguf, write_hf, tmp_path):
    """A GGUF file's rows, and the rows of a model with --rotary-interleaved, become those of the half layout."""
    path, weights = write_gguf(tiny)
    import_checkpoint(path, tmp_path / "half", dtype="fp32")
    export_checkpoint(tmp_path / "half", tmp_path / "a")
    source, _ = write_hf(tiny, weights=weights)  # the same rows, taken as they come ...
    import_checkpoint(source, tmp_path / "interleaved", dtype="fp32")
    rewrite(tmp_path / "interleaved", rotary_interleaved=True)  # ... by a model that pairs them as GGUF does
    export_checkpoint(tmp_path / "interleaved", tmp_path / "b")
    assert_same_bits(tensors(tmp_path / "a"), tensors(tmp_path / "b"))


def test_tokenizer_and_its_end_of_sequence_come_along(tiny, write_gguf, tmp_path):
    source, _ = write_gguf(tiny)
    import_checkpoint(source, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "out", dtype="fp16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["torch_dtype"]) == (0, None, "float16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "megatron" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["megatron", "out", "tiny.gguf"]


LLAMA = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "group_query_attention": False,
    "num_query_groups": 1, "kv_channels": None, "max_position_embeddings": 64, "rotary_base": 10000,
    "norm_epsilon": 1e-5, "untie_embeddings_and_output_weights": True, "vocab_size": 100,
}  # fmt: skip


def test_flags_of_a_trained_model():
    a = architecture_of(LLAMA | {"num_experts": None, "moe_layer_freq": 1, "init_method_std": 0.02}, "here")
    assert (a.num_query_groups, a.kv_channels, a.tied, a.rope_scaling_factor) == (4, 16, False, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalization": "LayerNorm"}, "here: normalization = 'LayerNorm' has no counterpart in a Llama-type model"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type = 'learned_absolute'"),
        ({"qk_layernorm": True}, "qk_layernorm = True"),
        ({"add_bias_linear": True}, "add_bias_linear = True"),
        ({"swiglu": False}, "swiglu = False"),
        ({"squared_relu": True}, "squared_relu = True"),
        ({"rotary_percent": 0.5}, "rotary_percent = 0.5"),
        ({"num_experts": 4}, "num_experts = 4"),
        ({"multi_latent_attention": True}, "multi_latent_attention = True"),
        ({"window_size": [4, 0]}, "window_size = .* is not known to have a counterpart"),
        ({"rotary_interleaved": True, "add_qkv_bias": True}, "rotary_interleaved with add_qkv_bias"),
        ({"num_layers": None}, "num_layers is None"),
    ],
)
def test_what_llama_can_not_express_is_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        architecture_of(LLAMA | change, "here")


def test_foreign_missing_and_damaged_tensors_are_named(tiny, write_hf, tmp_path):
    source, _ = write_hf(replace(tiny, qkv_bias=True), model_type="qwen2")
    checkpoint = tmp_path / "megatron"
    import_checkpoint(source, checkpoint)
    rewrite(checkpoint, add_qkv_bias=False)
    with pytest.raises(InputError, match=r"linear_qkv\.bias \(1 in all\) has no place in a Llama-type model"):
        export_checkpoint(checkpoint, tmp_path / "out")
    rewrite(checkpoint, add_qkv_bias=True, num_layers=3)
    with pytest.raises(InputError, match=r"decoder\.layers\.2\..* is missing"):
        export_checkpoint(checkpoint, tmp_path / "out")
    rewrite(checkpoint, num_layers=2)
    for file in (checkpoint / "release").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="can not be read"):
        export_checkpoint(checkpoint, tmp_path / "out")
    (checkpoint / "release" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"\.metadata can not be read"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


@pytest.mark.parametrize(
    ("iteration", "message"),
    [("7", "iter_0000007 is not there"), ("last", "--iteration last: give a number of iterations, release or latest")],
)
def test_iterations(tiny, write_hf, tmp_path, iteration, message):
    source, _ = write_hf(tiny)
    import_checkpoint(source, tmp_path / "megatron")
    with pytest.raises(InputError, match=message):
        export_checkpoint(tmp_path / "megatron", tmp_path / "out", iteration=iteration)
    (tmp_path / "megatron" / "release").rename(tmp_path / "megatron" / "iter_0000007")
    if iteration.isdecimal():
        export_checkpoint(tmp_path / "megatron", tmp_path / "out", iteration=iteration)
        assert (tmp_path / "out" / "config.json").exists()


def test_only_a_model_is_overwritten(tiny, write_hf, tmp_path, capsys):
    source, _ = write_hf(tiny)
    import_checkpoint(source, tmp_path / "megatron", dtype="fp32")
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    for output, extra, message in (
        (full, ["--overwrite"], "holds something that is no Hugging Face model"),
        (source, [], "holds a Hugging Face model already; --overwrite replaces it"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main([str(tmp_path / "megatron"), "--output", str(output), *extra])
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err
    before = tensors(source)
    assert main([str(tmp_path / "megatron"), "--output", str(source), "--overwrite", "--max-shard-size", "1GB"]) == 0
    assert_same_bits(tensors(source), before)


@pytest.mark.parametrize("foreign", ["notes.txt", "optimizer.pt", "onnx/model.onnx", "old.safetensors/x"])
def test_one_foreign_file_keeps_a_directory_from_being_replaced(tiny, write_hf, tmp_path, capsys, foreign):
    source, _ = write_hf(tiny)
    import_checkpoint(source, tmp_path / "megatron", dtype="fp32")
    (source / foreign).parent.mkdir(exist_ok=True)
    (source / foreign).write_text("precious")
    named = foreign if foreign.startswith("old") else foreign.split("/")[0]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "megatron"), "--output", str(source), "--overwrite"])
    assert f"no Hugging Face model: {named}; choose another" in capsys.readouterr().err
    with pytest.raises(InputError, match=named):
        export_checkpoint(tmp_path / "megatron", source)
    assert (source / foreign).read_text() == "precious"


@pytest.mark.parametrize("place", ["", "release", "..", "../link", "new"])
def test_the_checkpoint_that_is_read_is_never_replaced(tiny, write_hf, tmp_path, capsys, place):
    """Nor what is around or inside it, whatever lies there (a config.json, once, was enough to lose it all)."""
    source, _ = write_hf(tiny)
    checkpoint = tmp_path / "all" / "megatron"
    import_checkpoint(source, checkpoint, dtype="fp32")
    (tmp_path / "all" / "link").symlink_to(checkpoint)
    for directory in (checkpoint, checkpoint / "release", tmp_path / "all"):
        (directory / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as exit_:
        main([str(checkpoint), "--output", str(checkpoint / place), "--overwrite"])
    assert exit_.value.code == 2
    assert "read; choose another directory" in capsys.readouterr().err
    with pytest.raises(InputError, match="choose another directory"):
        export_checkpoint(checkpoint, checkpoint / place)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("config", ["{bad", "[1]"])
def test_a_broken_tokenizer_configuration_is_named(tiny, write_gguf, tmp_path, caplog, config):
    source, _ = write_gguf(tiny)
    import_checkpoint(source, tmp_path / "megatron")
    (tmp_path / "megatron" / "tokenizer_config.json").write_text(config)
    export_checkpoint(tmp_path / "megatron", tmp_path / "out")
    assert "tokenizer_config.json: no JSON object" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] is None


def test_a_checkpoint_without_model_json_is_exported_once_it_is_written(tiny, write_hf, tmp_path):
    """What Megatron-LM's own trainer leaves, and a model.json of the entries that docs/checkpoints.md names."""
    source, _ = write_hf(tiny)
    checkpoint = tmp_path / "megatron"
    import_checkpoint(source, checkpoint, dtype="fp32")
    flags = json.loads((checkpoint / "model.json").read_text())
    (checkpoint / "model.json").unlink()
    with pytest.raises(InputError, match=r"model\.json is missing: .* own trainer have none"):
        export_checkpoint(checkpoint, tmp_path / "out")
    example = re.search(r"```json\n(.*?)```", DOCUMENTATION.read_text(encoding="utf-8"), re.DOTALL)[1]
    by_hand = {name: flags[name] for name in json.loads(example)}
    for wrong, message in (
        ({"num_layers": 1}, r"holds 2 layers, model\.json says 1"),
        ({"num_query_groups": 1}, r"linear_qkv\.weight has \d+ rows, the heads, .* make \d+"),
        ({"ffn_hidden_size": 8}, "has the shape"),
        ({"hidden_size": 32}, "has the shape"),
    ):
        (checkpoint / "model.json").write_text(json.dumps(by_hand | wrong))
        with pytest.raises(InputError, match=message):
            export_checkpoint(checkpoint, tmp_path / "out")
    (checkpoint / "model.json").write_text(json.dumps(by_hand))
    export_checkpoint(checkpoint, tmp_path / "out")
    assert_same_bits(tensors(tmp_path / "out"), tensors(source))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("2 GiB", 2**31),
        ("500mb", 5 * 10**8),
        ("100KB", 10**5),
        ("1KiB", 1024),
        ("0.1MB", 10**5),
        ("1.1GB", 11 * 10**8),
    ],
)
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent", "--output", "x"], 2, "no such file or directory: absent"),
        ([".", "--output", "absent", "--max-shard-size", "5"], 2, "'5' is not a size such as 500MB"),
        ([".", "--output", "absent", "--max-shard-size", "0.0001KB"], 2, "'0.0001KB' is not a size"),
        (["tests", "--output", "absent"], 1, "tests holds no checkpoint of pretrain_gpt.py or import_checkpoint"),
    ],
)
def test_bad_input_is_one_line(arguments, code, message):
    """In a process of its own: quiet, one line, and its exit code."""
    command = [sys.executable, "-m", "script.model.export_checkpoint", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_real_model_out_of_gguf(tmp_path):
    """SmolLM2-135M, imported from GGUF: transformers computes on the export what megatron-core does."""
    from script.data.default import ensure_default_assets

    assets = ensure_default_assets()
    export_checkpoint(assets.checkpoint, tmp_path / "out", dtype="fp32")
    ids = list(range(1000, 1032))
    (theirs,) = of_transformers(ids, tmp_path / "out")
    assert_same_model(assets.checkpoint, ids, theirs, 1e-4)
