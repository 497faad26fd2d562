"""LayerNorm and RMSNorm against their formulas in float64, and torch's own bit for bit."""

from types import SimpleNamespace

import pytest
import torch

from megatron.training.norm import Norm

HIDDEN, EPS = 24, 1e-5


def build(normalization, *, zero_centred=False, sequence_parallel=False, dtype=torch.float32):
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centred,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
    )
    return Norm(config, HIDDEN, EPS)


def formula(norm, x, offset):
    x, weight = x.double(), norm.weight.detach().double() + offset
    if isinstance(norm, torch.nn.RMSNorm):
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) / (variance + EPS).sqrt() * weight + norm.bias.detach().double()


@pytest.fixture
def x():
    return torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(1)) * 3 + 1


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_formula(x, normalization, zero_centred):
    norm = build(normalization, zero_centred=zero_centred)
    assert torch.allclose(norm(x).double(), formula(norm, x, float(zero_centred)), atol=1e-5)  # weight as initialised
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(-0.5, 2.0)
    assert torch.allclose(norm(x).double(), formula(norm, x, float(zero_centred)), atol=1e-5)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centred_starts_as_the_plain_one_does(x, normalization):
    plain, centred = build(normalization), build(normalization, zero_centred=True)
    assert torch.equal(centred.weight, torch.zeros(HIDDEN))
    assert torch.equal(plain.weight, torch.ones(HIDDEN))
    assert torch.equal(plain(x), centred(x))


@pytest.mark.parametrize(
    ("normalization", "torchs"), [("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_norm_is_torchs(x, normalization, torchs, dtype):
    norm, expected = build(normalization, dtype=dtype), torchs(HIDDEN, eps=EPS, dtype=dtype)
    y = norm(x.to(dtype))
    assert y.dtype == dtype
    assert torch.equal(y, expected(x.to(dtype)))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gradient_of_the_zero_centred_weight(x, normalization):
    plain, centred = build(normalization), build(normalization, zero_centred=True)
    for norm in (plain, centred):
        norm(x).pow(2).sum().backward()
    assert torch.equal(plain.weight.grad, centred.weight.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_are_marked_for_sequence_parallelism(sequence_parallel):
    norm = build("LayerNorm", sequence_parallel=sequence_parallel)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [sequence_parallel] * 2
