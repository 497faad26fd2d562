"""Under torch.compile and with fake tensors fake quantisation is one operator, which gives the bits of eager mode."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron.quantscope.formats import FORMATS, cpp_backend, fake_quantize, fake_quantize_both, operators, quantize
from megatron.quantscope.formats.backends import BACKENDS

OPERATOR = torch.ops.quantscope.fake_quantize.default
NO_MACHINE_HOLDS = (1 << 30, 1 << 12)  # 8 TiB of bf16
CUSTOM = replace(FORMATS["mxfp8"], name="mine")
OPTIONS = {
    "another axis": {"fmt": "mxfp8", "axis": 0},
    "a negative axis": {"fmt": "mxfp4", "axis": -2},
    "another scale": {"fmt": "mxfp8", "scale_rule": "rceil"},
    "no saturation": {"fmt": "mxfp8_e5m2", "saturate": False},
    "saturation": {"fmt": "hifp8", "saturate": True},
    "the torch backend": {"fmt": "nvfp4", "backend": "torch"},
    "a record": {"fmt": FORMATS["fp8_e4m3"]},
    "an alias": {"fmt": "mxfp8_e4m3"},
}
by_name = pytest.mark.parametrize("name", FORMATS)
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def compiled(function: Callable[..., object], *, backend: object = "aot_eager", dynamic: bool | None = None) -> object:
    """torch.compile(fullgraph=True), whose name here belongs to the stand-in for CUDA, which compiles nothing."""
    return torch._dynamo.optimize(backend, nopython=True, dynamic=dynamic)(function)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Every test compiles anew: torch gives up on a function that was compiled too often."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_operator(monkeypatch):
    """The operator may not be called."""

    def called(*arguments: object) -> None:
        raise AssertionError("the operator was called")

    monkeypatch.setattr(operators, "_fake_quantize", called)


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=numbers) * torch.exp2(4 * torch.randn(shape, generator=numbers))).to(dtype)


@by_dtype
@by_name
def test_compiled_gives_the_bits_of_eager(name, dtype, assert_same_bits):
    x = sample(6, 70, dtype=dtype)

    def doubled(x: Tensor) -> Tensor:
        return 2 * fake_quantize(x + 1, name)

    assert_same_bits(compiled(doubled)(x), doubled(x))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_compiled_takes_every_option(options, assert_same_bits):
    x = 1e5 * sample(6, 70)

    def quantised(x: Tensor) -> Tensor:
        return fake_quantize(x, **options)

    assert_same_bits(compiled(quantised)(x), quantised(x))
    assert not torch.equal(quantised(x), x)


@by_name
def test_compiled_writes_to_out(name, assert_same_bits):
    x = sample(6, 70)
    expected = fake_quantize(x, name)

    def into(x: Tensor, out: Tensor) -> Tensor:
        return fake_quantize(x, name, out=out)

    for out in (torch.empty(6, 70), torch.empty(70, 6).t(), torch.zeros(6, 140)[:, ::2]):
        assert_same_bits(compiled(into)(x, out), expected)
        assert_same_bits(out, expected)
    assert_same_bits(x, sample(6, 70))


def test_compiled_writes_in_place(assert_same_bits):
    x = sample(6, 70)

    def in_place(x: Tensor) -> Tensor:
        return fake_quantize(x, "mxfp8", out=x) + 1

    y = compiled(in_place)(x)
    assert_same_bits(x, fake_quantize(sample(6, 70), "mxfp8"))
    assert_same_bits(y, x + 1)


def test_compiled_takes_the_amax_of_the_graph(assert_same_bits):
    def shard(x: Tensor) -> Tensor:
        return fake_quantize(x[:2], "nvfp4", amax=x.abs().max())

    x = sample(6, 64)
    assert_same_bits(compiled(shard)(x), fake_quantize(x, "nvfp4")[:2])


@by_name
def test_compiled_both_axes(name, assert_same_bits):
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return fake_quantize_both(x, name)

    x = sample(64, 96)
    for actual, expected in zip(compiled(both)(x), both(x), strict=True):
        assert_same_bits(actual, expected)


def test_one_graph_serves_changing_shapes(assert_same_bits):
    def quantised(x: Tensor) -> Tensor:
        return fake_quantize(x, "mxfp8", axis=0)

    fast = compiled(quantised)
    for rows in (5, 33, 64, 65):
        x = sample(rows, rows + 1)
        assert_same_bits(fast(x), quantised(x))


def test_a_graph_that_is_dynamic_from_the_start(assert_same_bits):
    def quantised(x: Tensor) -> Tensor:
        return fake_quantize(x, "mxfp8")

    x = sample(5, 33)
    assert_same_bits(compiled(quantised, dynamic=True)(x), quantised(x))


def test_compiled_result_is_no_part_of_autograds_graph():
    def half_quantised(x: Tensor) -> Tensor:
        return x + fake_quantize(x, "mxfp8")

    x = sample(2, 32).requires_grad_()
    compiled(half_quantised)(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not compiled(lambda x: fake_quantize(x, "mxfp8"))(x).requires_grad


def test_the_graph_holds_one_operator():
    graphs = []

    def keep(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(module.graph)
        return module.forward

    compiled(lambda x: fake_quantize(x, "mxfp4", axis=0) + 1, backend=keep)(sample(4, 5))
    (graph,) = graphs
    calls = [node for node in graph.nodes if node.op == "call_function" and "quantscope" in str(node.target)]
    assert len(calls) == 1
    assert list(calls[0].args[1:]) == ["mxfp4", 0, "floor", True, None, "auto"]


def test_a_graph_can_be_exported(assert_same_bits):
    class Quantise(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fake_quantize(x, "mxfp8")

    x = sample(4, 70)
    assert_same_bits(torch.export.export(Quantise(), (x,)).module()(x), fake_quantize(x, "mxfp8"))


@pytest.mark.slow
def test_inductor_gives_the_bits_of_eager(assert_same_bits):
    def doubled(x: Tensor) -> Tensor:
        return 2 * fake_quantize(x * 3, "mxfp8", axis=0)

    x = sample(40, 70, dtype=torch.bfloat16)
    assert_same_bits(compiled(doubled, backend="inductor")(x), doubled(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fmt": CUSTOM}, "under torch.compile a format must be one of bf16, .*fp8_e5m2, not 'mine'"),
        ({"fmt": "fp3"}, "unknown number format 'fp3'"),
        ({"fmt": "mxfp8", "axis": 2}, "axis 2 is not allowed for 2 dimensions"),
    ],
)
def test_bad_arguments_are_named_under_compile(arguments, message):
    with pytest.raises(Exception, match=message):
        compiled(lambda x: fake_quantize(x, **arguments))(sample(2, 32))
    with FakeTensorMode(), pytest.raises(ValueError, match=message) as error:
        fake_quantize(torch.empty(2, 32), **arguments)
    assert "\n" not in str(error.value)


def test_eager_calls_do_not_go_through_the_operator(no_operator):
    x = sample(4, 32)
    for name in FORMATS:
        fake_quantize(x, name)
        fake_quantize(torch.nn.Parameter(x), name, out=torch.empty_like(x))
        fake_quantize_both(x, name)
    with pytest.raises(Exception, match="the operator was called"):  # so this would have shown it
        compiled(lambda x: fake_quantize(x, "mxfp8"))(x)


@by_name
def test_fake_tensors_have_a_shape_and_no_memory(name):
    with FakeTensorMode():
        x = torch.empty(NO_MACHINE_HOLDS, dtype=torch.bfloat16)
        for layout in (x, x.t(), x[:, ::2], x[:1].expand(7, -1)):
            y = fake_quantize(layout, name, axis=0)
            assert isinstance(y, FakeTensor)
            assert (y.shape, y.dtype, y.device) == (layout.shape, layout.dtype, layout.device)
            assert y.stride() == torch.empty_like(layout).stride()
        out = torch.empty_like(x)
        assert fake_quantize(x, name, out=out) is out
        assert [part.shape for part in fake_quantize_both(x, name)] == [x.shape] * 2


@by_name
def test_strides_are_those_of_eager(name):
    shapes = {"whole": sample(6, 70), "turned": sample(70, 6).t(), "gaps": sample(6, 140)[:, ::2], "one": sample(1, 9)}
    for x in shapes.values():
        with FakeTensorMode() as mode:
            fake = fake_quantize(mode.from_tensor(x), name)
        assert fake.stride() == fake_quantize(x, name).stride()


def test_meta_tensors_have_a_shape():
    for name in FORMATS:
        y = fake_quantize(torch.empty(4, 64, device="meta"), name, backend="torch")
        assert (y.shape, y.device.type) == ((4, 64), "meta")


def test_codes_of_a_fake_tensor_are_not_asked_of_a_backend(monkeypatch):
    """They may be refused or be fake, but a backend needs memory."""
    if reason := BACKENDS["cpp"].lacks():
        pytest.skip(reason)
    called = []
    monkeypatch.setattr(cpp_backend, "encode", lambda *arguments: called.append(arguments))
    with FakeTensorMode(), suppress(TypeError, ValueError, NotImplementedError):
        quantize(torch.empty(4, 64), "mxfp8")
    assert not called


@pytest.mark.parametrize(
    "arguments",
    [
        (sample(6, 70), "mxfp8", 1, "floor", True, None, "auto"),
        (sample(70, 6).t(), "nvfp4", 0, "floor", True, torch.tensor(3.0), "auto"),
        (sample(6, 140)[:, ::2], "fp8_e5m2", 0, "floor", True, None, "torch"),
        (sample(6, 70).bfloat16(), "hifp8", 0, "floor", False, None, "auto"),
        (sample(6, 70).half(), "mxfp4", 1, "rceil", True, None, "auto"),
        (torch.tensor(1.7), "mxfp6_e2m3", 0, "floor", True, None, "auto"),
        (torch.empty(0, 5), "mxfp6_e3m2", 1, "floor", True, None, "auto"),
    ],
    ids=["plain", "transposed", "gaps", "bf16", "fp16", "scalar", "empty"],
)
def test_torch_finds_nothing_wrong_with_the_operator(arguments):
    results = torch.library.opcheck(OPERATOR, arguments)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4
