"""model.json: the model flags that travel with a checkpoint."""

import json

import pytest

from megatron.training.checkpoint.architecture import (
    ARCHITECTURE,
    apply_architecture,
    architecture_of,
    read_architecture,
    require_same_architecture,
    write_architecture,
)
from megatron.training.failure import UsageError
from megatron.training.flags.experts import EXPERT_FLAGS
from megatron.training.flags.model import MODEL_FLAGS

# What each run chooses anew: other values give other numbers in training or another precision, not another model.
OF_A_RUN = {
    "attention_dropout",
    "hidden_dropout",
    "moe_input_jitter_eps",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_dtype",
    "moe_token_dispatcher_type",
    "moe_pad_expert_input_to_capacity",  # with rows that count for nothing
}
OTHER_SPELLINGS = {"use_rotary_position_embeddings", "deprecated_use_mcore_models"}

LLAMA = {
    "num_layers": 3,
    "hidden_size": 96,
    "ffn_hidden_size": 200,
    "num_attention_heads": 6,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 24,
    "position_embedding_type": "rope",
    "rotary_base": 500000.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


def test_round_trip_over_another_command_line(parse, tmp_path):
    args = parse(**LLAMA)
    args.model_vocab_size = 1000
    write_architecture(tmp_path, architecture_of(args))
    other = parse()
    apply_architecture(other, tmp_path)
    other.model_vocab_size = 1000
    assert architecture_of(other) == architecture_of(args)
    expected = {name: value for name, value in LLAMA.items() if name != "disable_bias_linear"}
    assert {name: getattr(other, name) for name in expected} == expected
    assert other.add_bias_linear is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json"]


def test_every_flag_of_the_model_is_of_the_architecture_or_of_a_run():
    flags = [flag for group in (MODEL_FLAGS, EXPERT_FLAGS) for flag in group.flags if not flag.refused]
    known = {flag.dest or flag.name[2:].replace("-", "_") for flag in flags}
    assert known == set(ARCHITECTURE) | OF_A_RUN | OTHER_SPELLINGS
    assert not set(ARCHITECTURE) & OF_A_RUN


MIXTURE = {
    "num_experts": 4,
    "disable_bias_linear": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_expert_capacity_factor": 1.5,
    "moe_token_drop_policy": "position",
}


def test_round_trip_of_a_mixture(parse, tmp_path):
    write_architecture(tmp_path, architecture_of(parse(**MIXTURE)))
    other = parse()
    apply_architecture(other, tmp_path)
    expected = {name: value for name, value in MIXTURE.items() if name != "disable_bias_linear"}
    assert {name: getattr(other, name) for name in expected} == expected


BALANCING = "moe_router_load_balancing_type"


@pytest.mark.parametrize(
    ("there", "here", "applied"),
    [
        ("sinkhorn", "aux_loss", "sinkhorn"),
        ("aux_loss", "seq_aux_loss", "seq_aux_loss"),
        ("none", ["aux_loss", "seq_aux_loss"], ["aux_loss", "seq_aux_loss"]),
    ],
)
def test_of_the_ways_to_balance_only_the_one_that_routes_is_of_the_model(parse, tmp_path, there, here, applied):
    write_architecture(tmp_path, architecture_of(parse(num_experts=4, **{BALANCING: there})))
    args = parse(num_experts=4, moe_aux_loss_coeff=[0.1] * (1 if isinstance(here, str) else 2), **{BALANCING: here})
    ours = architecture_of(args)
    if there == "sinkhorn":
        with pytest.raises(UsageError, match=f"{BALANCING} is sinkhorn there and none here"):
            require_same_architecture(ours, tmp_path, "")
    else:
        require_same_architecture(ours, tmp_path, "")
    apply_architecture(args, tmp_path)
    assert getattr(args, BALANCING) == applied


def test_the_vocabulary_is_the_models_before_padding(parse):
    args = parse(vocab_size=100)
    args.model_vocab_size = 101
    assert architecture_of(args)["vocab_size"] == 101


def test_the_file_is_a_flat_json_object(parse, tmp_path):
    args = parse(**LLAMA)
    write_architecture(tmp_path, architecture_of(args))
    stored = json.loads((tmp_path / "model.json").read_text())
    assert stored == architecture_of(args)
    assert all(value is None or isinstance(value, str | int | float | bool) for value in stored.values())


def test_nothing_stored(parse, tmp_path):
    assert read_architecture(tmp_path) is None
    with pytest.raises(UsageError, match=r"--use-checkpoint-args: .*model.json does not exist"):
        apply_architecture(parse(), tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "can not be read"), ("[1]", "is not a JSON object"), ("\xff", "can not be read"), ('"x"', "is not a JSON")],
)
def test_unreadable(tmp_path, content, said):
    (tmp_path / "model.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=said) as caught:
        read_architecture(tmp_path)
    assert str(tmp_path / "model.json") in str(caught.value)


def test_unknown_entries_are_named_and_nothing_is_set(parse, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps({"num_layers": 9, "save": "/", "lr": 1}))
    args = parse()
    with pytest.raises(UsageError, match="unknown entries: lr, save"):
        apply_architecture(args, tmp_path)
    assert (args.num_layers, args.save) == (2, None)


class TestSameArchitecture:
    def test_difference_is_named_with_both_values(self, tmp_path):
        (tmp_path / "model.json").write_text('{"num_layers": 2, "rotary_base": 500000.0}')
        with pytest.raises(UsageError) as caught:
            require_same_architecture({"num_layers": 2, "rotary_base": 10000.0}, tmp_path, "turn back")
        assert str(caught.value) == (
            f"{tmp_path} holds another model: rotary_base is 500000.0 there and 10000.0 here; turn back"
        )

    @pytest.mark.parametrize(
        ("stored", "ours"),
        [
            ({"num_layers": 2}, {"num_layers": 2}),
            ({"vocab_size": 5}, {"vocab_size": None}),  # not known yet
            ({"init_method_std": 0.1}, {"init_method_std": 0.2}),
            ({"max_position_embeddings": 8}, {"max_position_embeddings": 9}),
            ({"of_a_later_version": 1}, {}),
        ],
    )
    def test_what_does_not_concern_the_weights_is_passed_by(self, tmp_path, stored, ours):
        (tmp_path / "model.json").write_text(json.dumps(stored))
        require_same_architecture(ours, tmp_path, "")

    def test_a_flag_that_is_not_given_here_differs(self, tmp_path):
        (tmp_path / "model.json").write_text('{"moe_router_num_groups": 2}')
        with pytest.raises(UsageError, match="moe_router_num_groups is 2 there and None here"):
            require_same_architecture({"moe_router_num_groups": None}, tmp_path, "")

    def test_new_directory(self, tmp_path):
        require_same_architecture({"num_layers": 2}, tmp_path / "new", "")
