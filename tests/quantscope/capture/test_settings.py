"""What the user asks for: filter, schedule, and flag before environment before default."""

import argparse

import pytest

from megatron.quantscope.capture import CaptureConfig, CaptureUsageError, Schedule, TensorFilter
from megatron.quantscope.flags import CAPTURE_FLAGS, add_flags
from megatron.quantscope.flags.capture import POINTS

QKV = "decoder.layers.3.self_attention.linear_qkv"


def parse(*command_line, **environment):
    parser = argparse.ArgumentParser()
    add_flags(parser, [CAPTURE_FLAGS])
    return CaptureConfig.from_namespace(parser.parse_args(command_line), environment)


class TestFilter:
    def test_nothing_given_keeps_all_but_the_head(self):
        keep = TensorFilter.parse(None)
        assert keep.keeps_rank(7)
        assert keep.keeps_module(QKV, 3)
        assert keep.keeps_tensor("forward", "input")
        assert not keep.keeps_module("output_layer", None)

    @pytest.mark.parametrize(
        ("word", "kept", "left_out"),
        [("layers=0-3,10", (0, 3, 10), (4, 9, 11)), ("layers=7", (7,), (6, 8)), ("layers=2-2", (2,), (1, 3))],
    )
    def test_layers(self, word, kept, left_out):
        keep = TensorFilter.parse([word])
        assert all(keep.keeps_module(QKV, layer) for layer in kept)
        assert not any(keep.keeps_module(QKV, layer) for layer in (*left_out, None))

    @pytest.mark.parametrize("pattern", ["linear_qkv", "*linear_qkv", "decoder.layers.3.*", "*self_att*", QKV])
    def test_modules_match_whole_name_or_last_part(self, pattern):
        keep = TensorFilter.parse([f"modules={pattern}"])
        assert keep.keeps_module(QKV, 3)
        assert not keep.keeps_module("decoder.layers.4.mlp.linear_fc1", 4)

    def test_the_head_is_kept_when_modules_name_it(self):
        assert TensorFilter.parse(["modules=output_layer"]).keeps_module("output_layer", None)
        assert not TensorFilter.parse(["modules=linear_*"]).keeps_module("output_layer", None)
        assert not TensorFilter.parse(["tensors=weight"]).keeps_module("output_layer", None)

    def test_every_key_has_to_match(self):
        keep = TensorFilter.parse(["tensors=grad_*,weight", "operations=backward", "ranks=1-2"])
        assert keep.keeps_tensor("backward", "grad_weight")
        assert keep.keeps_tensor("backward", "weight")
        assert not keep.keeps_tensor("forward", "weight")
        assert not keep.keeps_tensor("backward", "input")
        assert [keep.keeps_rank(rank) for rank in range(4)] == [False, True, True, False]
        assert keep.kept_ranks(world_size=8) == 2

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["layer=0"], "'layer=0' is not allowed: give layers=VALUES, modules=VALUES"),
            (["layers"], "'layers' has no values"),
            (["layers="], "has no values"),
            (["layers=3-1"], "layers=3-1 is not allowed"),
            (["layers=a"], "layers=a is not allowed"),
            (["layers=1-"], "layers=1- is not allowed"),
            (["layers=1,"], "layers= is not allowed"),
            (["layers=-1"], "layers=-1 is not allowed"),
            (["ranks=x"], "ranks=x is not allowed"),
            (["tensors=inputs"], "tensors=inputs matches nothing: allowed are input, weight"),
            (["operations=forwards"], "operations=forwards is not allowed: give forward, backward"),
            (["layers=0", "layers=1"], "gives layers twice"),
        ],
    )
    def test_bad_words(self, words, message):
        with pytest.raises(CaptureUsageError, match=message):
            TensorFilter.parse(words)


class TestSchedule:
    @pytest.mark.parametrize(
        ("text", "steps"),
        [
            (None, [0, 1, 2, 3, 4, 5, 6, 7]),
            ("0:1", [0, 1, 2, 3, 4, 5, 6, 7]),
            ("2", [2, 3, 4, 5, 6, 7]),
            ("1:3", [1, 4, 7]),
            (":2:5", [0, 2, 4]),
            ("3::5", [3, 4]),
            ("::", [0, 1, 2, 3, 4, 5, 6, 7]),
        ],
    )
    def test_steps(self, text, steps):
        schedule = Schedule.parse(text)
        assert [step for step in range(8) if schedule.collects(step)] == steps

    def test_exhausted(self):
        assert [Schedule.parse("1:2:4").exhausted(step) for step in range(6)] == [False] * 4 + [True] * 2
        assert not Schedule.parse("1:2").exhausted(10**9)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a", "'a' is not allowed: give START:EVERY:UNTIL"),
            ("1:2:3:4", "give START:EVERY:UNTIL"),
            ("-1", "give START:EVERY:UNTIL"),
            ("1.5", "give START:EVERY:UNTIL"),
            ("0:0", "EVERY must be >= 1"),
            ("5::5", "collects nothing: UNTIL must be greater than START"),
            ("::0", "collects nothing"),
        ],
    )
    def test_bad_text(self, text, message):
        with pytest.raises(CaptureUsageError, match=message):
            Schedule.parse(text)


class TestConfig:
    def test_defaults(self):
        config = parse()
        assert not config.enabled
        assert str(config.directory) == "enhanced_tensor_logs"
        assert (config.control_iter, config.collect_micro_batches) == (1, 1)
        assert (config.budget_bytes, config.host_memory_bytes) == (50 * 10**9, 2 * 10**9)
        assert not config.stop_on_error
        assert (config.mode, config.save_format, config.points) == ("tensors", "pt", frozenset())
        assert (config.fsync, config.dry_run) == (False, False)

    @pytest.mark.parametrize(
        ("text", "enabled"),
        [("1", True), ("TRUE", True), ("Yes", True), ("on", True), ("0", False), ("No", False), ("", False)],
    )
    def test_environment_before_default(self, text, enabled):
        config = parse(TENSOR_SAVE_ENABLED=text, TENSOR_SAVE_DIR="/elsewhere")
        assert config.enabled is enabled
        assert str(config.directory) == "/elsewhere"

    def test_flag_before_environment(self):
        config = parse(
            "--save-tensors", "--tensor-save-dir", "/mine", TENSOR_SAVE_ENABLED="0", TENSOR_SAVE_DIR="/other"
        )
        assert config.enabled
        assert str(config.directory) == "/mine"

    def test_every_flag_arrives(self):
        config = parse(
            *("--control-iter", "3"),
            *("--collect-micro-batches", "2"),
            *("--tensor-filter", "layers=1", "ranks=0"),
            *("--tensor-schedule", "5:2"),
            *("--tensor-budget-gb", "0.5"),
            *("--tensor-host-memory-gb", "0.25"),
            *("--tensor-on-error", "stop"),
            *("--tensor-save-mode", "both"),
            *("--tensor-save-format", "segment"),
            *("--tensor-points", POINTS[0], POINTS[-1]),
            "--tensor-fsync",
            "--tensor-dry-run",
        )
        assert (config.control_iter, config.collect_micro_batches, config.stop_on_error) == (3, 2, True)
        assert config.filter == TensorFilter(layers=((1, 1),), ranks=((0, 0),))
        assert config.schedule == Schedule(start=5, every=2)
        assert (config.budget_bytes, config.host_memory_bytes) == (500_000_000, 250_000_000)
        assert (config.mode, config.save_format, config.points) == ("both", "segment", {POINTS[0], POINTS[-1]})
        assert config.fsync
        assert config.dry_run

    @pytest.mark.parametrize(
        ("mode", "tensors", "blocks"), [("tensors", True, False), ("statistics", False, True), ("both", True, True)]
    )
    def test_what_a_mode_keeps(self, mode, tensors, blocks):
        config = parse("--tensor-save-mode", mode)
        assert (config.keeps_tensors, config.keeps_blocks) == (tensors, blocks)

    @pytest.mark.parametrize(
        ("setting", "value", "message"),
        [
            ("tensor_save_mode", "all", "--tensor-save-mode 'all' is not allowed: give tensors, statistics, both"),
            ("tensor_save_format", "zip", "--tensor-save-format 'zip' is not allowed: give pt, segment"),
            ("tensor_points", ["nowhere"], "--tensor-points 'nowhere' is not allowed: give "),
        ],
    )
    def test_a_namespace_made_by_hand_is_checked_too(self, setting, value, message):
        with pytest.raises(CaptureUsageError, match=message):
            CaptureConfig.from_namespace(argparse.Namespace(**{setting: value}), {})

    def test_a_word_that_is_neither_yes_nor_no_is_refused(self):
        with pytest.raises(CaptureUsageError, match="TENSOR_SAVE_ENABLED='maybe' is not allowed: give 1, true"):
            parse(TENSOR_SAVE_ENABLED="maybe")

    def test_resolved_values_are_written_back(self):
        namespace = argparse.Namespace(save_tensors=None, tensor_save_dir=None)
        CaptureConfig.from_namespace(namespace, {"TENSOR_SAVE_ENABLED": "on", "TENSOR_SAVE_DIR": "there"}).write_back(
            namespace
        )
        assert namespace == argparse.Namespace(save_tensors=True, tensor_save_dir="there")
