"""Sizes of a Llama-type model and the flags that say them."""

from dataclasses import replace

import pytest

from megatron.training.checkpoint.architecture import ARCHITECTURE as TRAINER_ENTRIES
from script.data.command_line import InputError
from script.model.architecture import LlamaArchitecture

SMALL = LlamaArchitecture(
    num_layers=2, hidden_size=96, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
    max_position_embeddings=64, rotary_base=5000.0, norm_epsilon=3e-5, vocab_size=296, tied=False,
)  # fmt: skip


@pytest.mark.parametrize("scaling", [None, 32.0])
def test_the_trainer_knows_every_flag(scaling):
    flags = replace(SMALL, rope_scaling_factor=scaling, position_divisor=scaling, qkv_bias=True).flags()
    assert flags.keys() <= set(TRAINER_ENTRIES)
    assert flags["add_qkv_bias"] is True
    assert flags.get("rotary_seq_len_interpolation_factor") == scaling
    assert flags.get("use_rope_scaling", False) is (scaling is not None)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_head(tied):
    assert replace(SMALL, tied=tied).flags()["untie_embeddings_and_output_weights"] is not tied


@pytest.mark.parametrize(("vocabulary", "multiple"), [(49152, 128), (32000, 128), (128256, 128), (296, 8), (50257, 1)])
def test_no_padding_of_the_vocabulary(vocabulary, multiple):
    assert replace(SMALL, vocab_size=vocabulary).flags()["make_vocab_size_divisible_by"] == multiple


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, it must be above 0"),
        ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0"),
        ({"num_query_groups": 3}, "4 query heads can not be shared by 3 key/value heads"),
        ({"kv_channels": 15}, "a head is 15 wide, rotary positions need an even width"),
    ],
)
def test_impossible_sizes(change, message):
    with pytest.raises(InputError, match=message):
        replace(SMALL, **change)
