"""File names: what is written is read back, in the full form and in the two older ones; what is unsafe is refused."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.quantscope.capture import CaptureError, CaptureName, CaptureUsageError, parse_name
from megatron.quantscope.capture.names import LONGEST_NAME
from megatron.quantscope.flags.quantization import QUANT_TYPES

EXAMPLE = "20241201_143022_0001_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt"
NAME = CaptureName(
    stamp="20241201_143022",
    counter=1,
    iteration=0,
    layer_type="linear",
    layer_idx=0,
    operation="forward",
    phase="post",
    component="linear",
    quant_type="bf16",
    rank=0,
    sample_idx=0,
    tensor_name="output",
)

word = st.from_regex(r"[A-Za-z][A-Za-z0-9.-]{0,9}", fullmatch=True).filter(lambda text: not re.fullmatch(r"L\d+", text))
number = st.integers(0, 10**7)
names = st.builds(
    CaptureName,
    stamp=st.datetimes().map(lambda time: time.strftime("%Y%m%d_%H%M%S").zfill(15)),
    counter=number,
    iteration=number,
    layer_type=word,
    layer_idx=st.none() | number,
    operation=word,
    phase=word,
    component=word,
    quant_type=word | st.sampled_from(QUANT_TYPES),
    rank=number,
    sample_idx=number,
    tensor_name=word | st.sampled_from(["grad_output", "grad_weight", "attention_probs", "a_rank1_sample2_b"]),
)


def test_the_name_of_the_design():
    assert NAME.filename() == EXAMPLE
    assert parse_name(EXAMPLE) == NAME


@given(names)
def test_round_trip(name):
    assert parse_name(name.filename()) == name


@given(
    layer_type=st.sampled_from(["self_attention", "cross_attn", "linear"]),
    component=st.sampled_from(["linear_qkv", "FA", "core_attention"]),
    quant_type=st.sampled_from(QUANT_TYPES),
    layer_idx=st.none() | number,
    operation=st.sampled_from(["forward", "backward"]),
    phase=st.sampled_from(["pre", "post", "unknown"]),
)
def test_round_trip_with_underscores_around_known_words(**parts):
    name = replace(NAME, **parts)
    assert parse_name(name.filename()) == name


def test_numbers_grow_beyond_their_padding():
    name = replace(NAME, counter=123456, iteration=12345)
    assert "_123456_iter12345_" in name.filename()
    assert parse_name(name.filename()) == name


def test_outside_the_layers_there_is_no_layer_part():
    name = replace(NAME, layer_idx=None)
    assert "_linear_forward_" in name.filename()
    assert parse_name(name.filename()).layer_idx is None


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        (
            "20240601_101112_7_linear_L3_forward_mxfp8_input.pt",
            {"layer_type": "linear", "layer_idx": 3, "operation": "forward", "quant_type": "mxfp8", "phase": None},
        ),
        (
            "20240601_101112_7_attention_L3_backward_mxfp8_e5m2_grad_query.pt",
            {"operation": "backward", "quant_type": "mxfp8_e5m2", "tensor_name": "grad_query", "component": None},
        ),
        (
            "20240601_101112_0007_attention_L12_forward_pre_FA_hifp8_query.pt",
            {"layer_idx": 12, "phase": "pre", "component": "FA", "quant_type": "hifp8", "tensor_name": "query"},
        ),
        (
            "20240601_101112_0007_linear_L1_backward_post_linear_mytype_grad_input.pt",
            {"phase": "post", "component": "linear", "quant_type": "mytype", "tensor_name": "grad_input"},
        ),
    ],
)
def test_older_forms(filename, expected):
    name = parse_name(filename)
    assert {key: getattr(name, key) for key in expected} == expected
    assert (name.counter, name.iteration, name.rank, name.sample_idx) == (7, None, None, None)


@pytest.mark.parametrize(
    ("filename", "canonical"),
    [
        ("20240601_101112_1_linear_L0_backward_bf16_input.pt", "grad_output"),
        ("20240601_101112_1_linear_L0_backward_pre_linear_bf16_output.pt", "grad_input"),
        ("20240601_101112_1_attention_L0_forward_post_FA_bf16_context.pt", "output"),
        ("20240601_101112_1_linear_L0_forward_bf16_input.pt", "input"),
        (EXAMPLE.replace("forward", "backward"), "output"),  # the full form says what it means
    ],
)
def test_gradients_of_the_older_forms_get_their_own_names(filename, canonical):
    assert parse_name(filename).canonical_tensor_name == canonical


@pytest.mark.parametrize(
    "filename",
    ["", "model.pt", "notes.txt", EXAMPLE[:-3], f"x{EXAMPLE}", EXAMPLE.replace("_0001_", "_one_"), "a_b_c.pt"],
)
def test_foreign_names_are_not_read(filename):
    assert parse_name(filename) is None


@pytest.mark.parametrize("part", ["layer_type", "operation", "phase", "component", "quant_type", "tensor_name"])
@pytest.mark.parametrize("value", ["", "../x", "a/b", "a\\b", "a b", ".hidden", "a\0b", "a\nb", "ä", "x" * 65, None, 3])
def test_unsafe_parts_are_refused(part, value):
    with pytest.raises(CaptureUsageError, match=part):
        replace(NAME, **{part: value}).filename()


@pytest.mark.parametrize("part", ["operation", "phase"])
def test_operation_and_phase_are_one_word(part):
    with pytest.raises(CaptureUsageError, match="without '_'"):
        replace(NAME, **{part: "a_b"}).filename()


@pytest.mark.parametrize("part", ["counter", "iteration", "rank", "sample_idx", "layer_idx"])
@pytest.mark.parametrize("value", [-1, 1.5, "0"])
def test_numbers_are_whole_and_not_negative(part, value):
    with pytest.raises(CaptureUsageError, match=f"{part} .* whole number >= 0"):
        replace(NAME, **{part: value}).filename()


def test_a_name_that_no_file_system_takes_is_refused():
    long = dict.fromkeys(("layer_type", "component", "tensor_name"), "x" * 64)
    with pytest.raises(CaptureUsageError, match=f"longer than {LONGEST_NAME} bytes"):
        replace(NAME, **long).filename()
    assert issubclass(CaptureUsageError, CaptureError)
    assert issubclass(CaptureUsageError, ValueError)
