"""What follows from the flags, against plain integer arithmetic and upstream's own calculators."""

import json

import pytest

from megatron.training.checkpoint.checkpoint_directory import LATEST
from megatron.training.failure import UsageError
from megatron.training.main import main
from megatron.training.validation import complete_model, iterations_for, prefixes_of, set_vocabulary


@pytest.mark.parametrize("hidden", [8, 64, 96, 192, 768, 1536, 2048, 4096, 5120, 8192])
def test_width_of_the_mlp(parse, hidden):
    assert parse(hidden_size=hidden).ffn_hidden_size == 4 * hidden
    assert parse(hidden_size=hidden, swiglu=True).ffn_hidden_size == max(64, 8 * hidden // 3 // 64 * 64)


def test_width_of_the_gated_mlp_is_exact_for_every_multiple_of_8(parse):
    args = parse(swiglu=True)
    for hidden in range(24, 20000, 8):
        args.hidden_size, args.ffn_hidden_size = hidden, None
        assert complete_model(args).ffn_hidden_size == max(64, 8 * hidden // 3 // 64 * 64), hidden


def test_sizes_that_follow_from_others(parse):
    args = parse(num_attention_heads=8, num_query_groups=2)
    assert (args.kv_channels, args.num_query_groups, args.max_position_embeddings) == (8, 8, 32)
    args = parse(num_attention_heads=8, num_query_groups=2, group_query_attention=True, kv_channels=4)
    assert (args.kv_channels, args.num_query_groups) == (4, 2)
    assert parse(seq_length=None, max_position_embeddings=48).seq_length == 48


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"use_rotary_position_embeddings": True}, "position_embedding_type", "rope"),
        ({"recompute_activations": True}, "recompute_granularity", "selective"),
        ({"sequence_parallel": True}, "sequence_parallel", False),
        ({"bf16": True}, "accumulate_allreduce_grads_in_fp32", True),
        ({"bf16": True, "grad_reduce_in_bf16": True}, "accumulate_allreduce_grads_in_fp32", False),
        ({"fp16": True}, "accumulate_allreduce_grads_in_fp32", False),
        ({"weight_decay": 0.3}, "start_weight_decay", 0.3),
        ({"weight_decay": 0.3, "end_weight_decay": 0.7}, "end_weight_decay", 0.3),
    ],
)
def test_flag_that_another_one_sets(parse, changes, name, value):
    assert getattr(parse(**changes), name) == value


@pytest.mark.parametrize(
    ("ranks", "sizes", "data_parallel_size"),
    [
        (1, {}, 1),
        (4, {}, 4),
        (4, {"tensor_model_parallel_size": 2}, 2),
        (4, {"pipeline_model_parallel_size": 2}, 2),
        (4, {"context_parallel_size": 2}, 2),
        (8, {"tensor_model_parallel_size": 2, "context_parallel_size": 4}, 1),
    ],
)
def test_data_parallel_size_and_batch(parse, monkeypatch, ranks, sizes, data_parallel_size):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", str(ranks - 1))
    args = parse(micro_batch_size=3, **sizes)
    assert (args.rank, args.data_parallel_size) == (ranks - 1, data_parallel_size)
    assert args.global_batch_size == 3 * data_parallel_size


@pytest.mark.parametrize(
    ("samples", "batch", "rampup"),
    [
        (64, 8, None),
        (64, 8, [2, 2, 24]),
        (200, 16, [4, 4, 100]),
        (33, 8, [7, 1, 24]),
        (1000, 64, [16, 16, 7]),
        (30, 8, [2, 2, 24]),
    ],
)
def test_iterations_for_samples(parse, samples, batch, rampup):
    from megatron.core import num_microbatches_calculator as upstream

    args = parse(train_iters=None, train_samples=samples, global_batch_size=batch, rampup_batch_size=rampup)
    start, step, over = rampup or (batch, 1, 1)
    if start == batch:
        calculator = upstream.ConstantNumMicroBatchesCalculator(batch, 1, 1, False, 0)
    else:
        calculator = upstream.RampupBatchsizeNumMicroBatchesCalculator(batch, 1, 1, False, 0, start, step, over)
    consumed = iterations = 0
    while consumed < samples:
        calculator.update(consumed, consistency_check=True)
        consumed += calculator.get_current_global_batch_size()
        iterations += 1
    assert args.train_iters == iterations == iterations_for(args)


@pytest.mark.parametrize(
    "values",
    [
        ["a"],
        ["a", "b"],
        ["1", "a"],
        ["0.5", "a", "0.5", "b"],
        [".5", "a", "2.", "b"],
        ["1e-1", "a", "9e-1", "b"],
        ["a", "b", "c"],
        ["1", "a", "2"],
    ],
)
def test_prefixes_of_a_blend_are_upstreams(values):
    from megatron.core.datasets.utils import get_blend_from_list

    assert list(prefixes_of(values)) == list(get_blend_from_list(values)[0])


def test_prefixes_of_nothing():
    assert prefixes_of([]) == []


@pytest.mark.parametrize("present", [[], [".bin"], [".idx"]])
def test_missing_data_is_named(parse, tmp_path, present):
    prefix = tmp_path / "corpus"
    for suffix in present:
        prefix.with_suffix(suffix).touch()
    missing = ".idx" if present == [".bin"] else ".bin"
    with pytest.raises(UsageError) as caught:
        parse(mock_data=None, data_path=["0.3", prefix])
    assert str(caught.value) == f"--data-path: {prefix}{missing} does not exist"


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--tokenizer-model", {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("--load", {}),
        ("--vocab-file", {"tokenizer_type": "GPT2BPETokenizer", "merge_file": "merges.txt"}),
    ],
)
def test_missing_path_is_named(parse, tmp_path, flag, changes):
    path = tmp_path / "nowhere"
    with pytest.raises(UsageError) as caught:
        parse(**changes, **{flag.lstrip("-").replace("-", "_"): path})
    assert str(caught.value) == f"{flag}: {path} does not exist"


def test_split_has_a_default_only_for_one_data_path(parse, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"d{suffix}").touch()
    assert parse(mock_data=None, data_path=tmp_path / "d").split == "969,30,1"
    assert parse(mock_data=None, train_data_path=tmp_path / "d").split is None
    assert parse().split is None


class TestLoad:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        def write(name="3", **architecture):
            (tmp_path / LATEST).write_text(name)
            folder = "release" if name == "release" else f"iter_{int(name):07d}"
            (tmp_path / folder).mkdir()
            (tmp_path / "model.json").write_text(json.dumps(architecture))
            return tmp_path

        return write

    def test_empty_directory_is_an_error(self, parse, tmp_path):
        with pytest.raises(UsageError, match=r"--load: no checkpoint in .*_iteration\.txt is missing"):
            parse(load=tmp_path)

    def test_empty_directory_is_where_a_job_that_saves_there_starts(self, parse, tmp_path):
        assert parse(load=tmp_path, save=tmp_path).load == str(tmp_path)
        assert parse(load=tmp_path / "new", save=tmp_path / "new").load == str(tmp_path / "new")
        with pytest.raises(UsageError, match="no checkpoint"):
            parse(load=tmp_path, save=tmp_path, exit_on_missing_checkpoint=True)

    def test_another_model_is_refused_by_the_flag_that_differs(self, parse, checkpoint):
        directory = checkpoint(num_layers=2, hidden_size=128)
        with pytest.raises(UsageError, match="hidden_size is 128 there and 64 here; --use-checkpoint-args takes"):
            parse(load=directory)

    def test_model_flags_come_from_the_checkpoint(self, parse, checkpoint):
        directory = checkpoint(num_layers=7, hidden_size=96, num_attention_heads=3, vocab_size=500, rotary_base=5e5)
        args = parse(load=directory, use_checkpoint_args=True, num_layers=None, hidden_size=None)
        assert (args.num_layers, args.hidden_size, args.kv_channels, args.rotary_base) == (7, 96, 32, 5e5)
        assert (args.model_vocab_size, args.padded_vocab_size) == (500, 512)

    def test_model_flags_from_nowhere(self, parse):
        with pytest.raises(UsageError, match="--use-checkpoint-args needs --load DIR"):
            parse(use_checkpoint_args=True)

    def test_the_checkpoint_of_an_iteration_has_to_be_there(self, parse, checkpoint):
        directory = checkpoint()
        assert parse(load=directory, ckpt_step=3).ckpt_step == 3
        with pytest.raises(UsageError, match=r"--ckpt-step 2: not in .*, which has 3"):
            parse(load=directory, ckpt_step=2)

    def test_distributed_optimizer_starts_from_a_release(self, parse, checkpoint):
        assert parse(load=checkpoint("release"), use_distributed_optimizer=True).use_distributed_optimizer


def test_vocabulary_is_padded_for_the_tensor_parallel_ranks(parse, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = parse(tensor_model_parallel_size=2, make_vocab_size_divisible_by=64)
    for size, padded in ((1, 128), (128, 128), (129, 256), (32000, 32000), (49152, 49152), (50257, 50304)):
        set_vocabulary(args, size)
        assert (args.model_vocab_size, args.padded_vocab_size) == (size, padded)


@pytest.mark.parametrize(
    ("rank", "ranks", "line"),
    [
        ("a", "2", "the environment's RANK is 'a', not a number; torchrun sets it, or unset it"),
        ("-1", "2", "the environment's RANK is '-1', not a number; torchrun sets it, or unset it"),
        ("0", "", "the environment's WORLD_SIZE is '', not a number; torchrun sets it, or unset it"),
        ("2", "2", "the environment's RANK is 2, and WORLD_SIZE 2; torchrun sets both, or unset them"),
        ("0", "0", "the environment's RANK is 0, and WORLD_SIZE 0; torchrun sets both, or unset them"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_one_line(command, monkeypatch, capsys, rank, ranks, line):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setattr("megatron.training.main.GRACE_S", 0.0)
    assert main(command()) == 2
    assert capsys.readouterr() == ("", f"pretrain_gpt.py: error: {line}\n")
