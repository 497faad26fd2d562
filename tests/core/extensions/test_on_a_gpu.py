"""TransformerEngine itself, and flash attention on CUDA: what the stand-in and the CPU can not say.

    python -m pytest -q -n 0 -m gpu tests/core

TransformerEngine's tests skip where the package is missing, and a recipe's where the device does not have it.
"""

import importlib.util
import math
import re

import pytest
import torch
from torch.nn.functional import rms_norm

from megatron.quantscope.capture import open_capture
from tests.end_to_end.conftest import LAYERS, launch

pytestmark = pytest.mark.gpu
needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="the package transformer-engine is not installed (pip install transformer-engine[pytorch])",
)
ENGINE = ["--transformer-impl", "transformer_engine", "--bf16", "--no-gradient-accumulation-fusion"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
RECIPES = {  # flags, and the compute capability that the recipe needs
    "delayed": (["--fp8-format", "hybrid", "--fp8-amax-history-len", 16, "--fp8-amax-compute-algo", "max"], (8, 9)),
    "tensorwise": (["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"], (8, 9)),
    "mxfp8": (["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"], (10, 0)),
    "nvfp4": (["--fp4-format", "e2m1"], (10, 0)),
}
BF16_ERROR = 1e-2  # of a product, relative to its norm: the operands are exact, the result is rounded
QUANTISED_ERROR = {"delayed": 0.2, "tensorwise": 0.1, "mxfp8": 0.1, "nvfp4": 0.3}
ROWS = LAYERS * (4 * 7 + 8)
LENGTH, BATCH, HEADS, GROUPS, WIDTH = 256, 2, 8, 2, 64


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """`kept(*flags)` -> (losses, capture) of three steps, of which the first micro-batches are kept."""

    def run(*flags):
        directory = tmp_path_factory.mktemp("kept")
        losses = train("--save-tensors", "--tensor-save-dir", directory, "--control-iter", 3, *flags)
        return losses, open_capture(directory)

    return run


def train(*flags):
    result = launch(*ENGINE, *flags, NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return re.findall(r"lm loss: (\S+)", result.stdout)


def errors_of(capture, iteration):
    """Of every linear layer's y, dx and dw, the difference from the product of the kept operands, over its norm."""
    modules = {}
    for record in capture.records:
        if (record.iteration, record.layer_type) == (iteration, "linear"):
            modules.setdefault(record.module, {})[record.operation, record.tensor_name] = record
    for module, rows in modules.items():
        loaded = {key: capture.load(record).double() for key, record in rows.items()}
        x, w = (loaded["forward", name].requires_grad_() for name in ("input", "weight"))
        operand = rms_norm(x, x.shape[-1:], eps=1e-5) if module.endswith(("linear_qkv", "linear_fc1")) else x
        y = operand @ w.t()
        dx, dw = torch.autograd.grad(y, (x, w), loaded["backward", "grad_output"])
        found = loaded["forward", "output"], loaded["backward", "grad_input"], loaded["backward", "grad_weight"]
        for name, one, other in zip(("y", "dx", "dw"), found, (y, dx, dw), strict=True):
            yield module, name, float((one - other).norm() / other.norm())


def require(capability):
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs a device of compute capability {capability}")


@needs_engine
def test_capture_changes_no_bit_and_keeps_the_operands_of_the_gemms(kept):
    losses, capture = kept()
    assert losses == train()
    assert not capture.problems
    assert len(capture.records) == 3 * ROWS
    assert all(error < BF16_ERROR for _, _, error in errors_of(capture, 0)), list(errors_of(capture, 0))


@needs_engine
@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_of_quantised_gemms_are_in_high_precision(kept, recipe):
    """Results are as far from the product of the kept operands as the format is coarse, and no nearer than rounding."""
    flags, capability = RECIPES[recipe]
    require(capability)
    losses, capture = kept(*flags)
    assert losses == train(*flags)
    assert len(capture.records) == 3 * ROWS
    errors = {(module, name): error for module, name, error in errors_of(capture, 2)}  # delayed: with scales by now
    assert max(errors.values()) < QUANTISED_ERROR[recipe], errors
    assert max(errors.values()) > BF16_ERROR, "nothing was quantised"


@needs_engine
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_weights_that_exist_in_fp8_only_are_dequantised(kept, recipe):
    flags, capability = RECIPES[recipe]
    require(capability)
    _, capture = kept(*flags, "--fp8-param-gather", "--use-distributed-optimizer")
    weights = [record for record in capture.records if record.tensor_name == "weight"]
    assert {(record.stage, record.operation) for record in weights} == {("dequantized", "forward")}
    assert all(capture.load(record).dtype in (torch.bfloat16, torch.float32) for record in weights)
    assert all(capture.load(record).abs().max() > 0 for record in weights)


@needs_engine
def test_a_forward_recomputed_under_fp8_is_kept_once(kept):
    flags, capability = RECIPES["tensorwise"]
    require(capability)
    losses, capture = kept(*flags, *RECOMPUTE)
    assert losses == train(*flags, *RECOMPUTE)
    assert len(capture.records) == 3 * ROWS
    assert all(record.recomputed for record in capture.records)


@needs_engine
@pytest.mark.parametrize(
    "flags",
    [
        ["--attention-backend", "fused"],
        ["--attention-backend", "unfused"],
        ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"],
    ],
    ids=["fused attention", "unfused attention", "cross entropy"],
)
def test_another_kernel_gives_the_same_losses(flags):
    assert list(map(float, train(*flags))) == pytest.approx(list(map(float, train())), rel=BF16_ERROR)


@pytest.fixture
def attention(build_model):
    """`attention(cls, dropout)` -> one attention of 8 heads on the GPU."""
    import copy

    from megatron.core.transformer.enums import AttnMaskType

    def build(cls, dropout=0.0):
        config = copy.copy(build_model().config)
        sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": WIDTH, "bf16": True}
        vars(config).update(sizes, attention_dropout=dropout)
        return cls(config, 1, AttnMaskType.causal, "self")

    return build


def operands():
    generator = torch.Generator("cuda").manual_seed(5)
    sizes = ((LENGTH, BATCH, count, WIDTH) for count in (HEADS, GROUPS, GROUPS))
    made = [torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16) for size in sizes]
    return [tensor.requires_grad_() for tensor in made]


def reference(query, key, value):
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=2) for tensor in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(WIDTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(-2)


@pytest.mark.parametrize("package", [True, False], ids=["flash-attn", "torch"])
def test_flash_attention_is_the_formula(attention, monkeypatch, package):
    from megatron.core.transformer import flash_attention

    if package and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("the package flash-attn is not installed")
    monkeypatch.setattr(flash_attention, "PACKAGE", "flash_attn" if package else "no_such_package")
    module, (q, k, v) = attention(flash_attention.FlashAttention), operands()
    found, expected = module(q, k, v, None), reference(q, k, v)
    weights = torch.linspace(-1, 1, found.numel(), device="cuda").view(found.shape)
    gradients = torch.autograd.grad(found, (q, k, v), weights.bfloat16())
    by_hand = torch.autograd.grad(expected, (q, k, v), weights.double())
    for one, other in zip((found, *gradients), (expected, *by_hand), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=3e-2, atol=3e-2)


def test_dropout_of_flash_attention_draws_from_the_fork(attention):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.flash_attention import FlashAttention

    module, (q, k, v) = attention(FlashAttention, dropout=0.5), operands()
    tracker, outside = get_cuda_rng_tracker(), torch.cuda.get_rng_state()
    states = tracker.get_states()
    first = module(q, k, v, None)
    second = module(q, k, v, None)
    tracker.set_states(states)
    assert torch.equal(module(q, k, v, None), first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.cuda.get_rng_state(), outside)
