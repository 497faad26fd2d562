"""The probe of TransformerEngine's modules, on layers that have what it looks at; TransformerEngine is not needed."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core import fp8_utils
from megatron.core.extensions import te_kinds
from megatron.core.extensions import transformer_engine as te
from megatron.core.probe import Probe
from megatron.quantscope.capture import recompute
from megatron.quantscope.gemm import QuantConfig

ROWS, IN, OUT = 6, 4, 3


class OneNode(torch.autograd.Function):
    """y = x wT as one node that takes the weight first, and gives a second result that is none."""

    @staticmethod
    def forward(ctx, weight, x, settings):
        ctx.save_for_backward(weight, x)
        return x @ values_of(weight).t(), None

    @staticmethod
    def backward(ctx, dy, _):
        weight, x = ctx.saved_tensors
        return dy.t() @ x, dy @ values_of(weight), None


class Codes(torch.Tensor):
    """A weight that holds half of its values, and gives them when asked."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_subclass(cls, values.detach() / 2)

    def dequantize(self):
        return self.detach().as_subclass(torch.Tensor) * 2


def values_of(weight):
    return weight.dequantize() if isinstance(weight, Codes) else weight


class Layer(torch.nn.Module):
    fuse_wgrad_accumulation = False

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(OUT, IN))

    def forward(self, x):
        return OneNode.apply(self.weight, x, object())[0].view(x.size(0), OUT), None


class Rows:
    """A site that keeps what it is shown, under the moment of the tap."""

    def __init__(self):
        self.moment, self.rows = 0, {}

    def tap(self):
        moment = self.moment
        return None if moment is None else lambda *key, moment=moment: self._keep(moment, *key)

    def _keep(self, moment, operation, phase, name, tensor):
        assert type(tensor) in (torch.Tensor, torch.nn.Parameter)
        assert (moment, operation, phase, name) not in self.rows
        self.rows[moment, operation, phase, name] = tensor.detach().clone()


@pytest.fixture
def probed():
    """A layer with a probe, and its site."""
    torch.manual_seed(0)
    layer, site = Layer(), Rows()
    te._attaches(te._probed_linear_forward)(layer, Probe(None, site))
    return layer, site


@pytest.fixture
def low_precision(monkeypatch):
    """megatron-core takes `Codes` for the FP8 tensors of TransformerEngine 2."""
    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Codes)
    monkeypatch.setattr(fp8_utils, "is_te_min_version", lambda version: True)


def test_operands_results_and_gradients_are_shown(probed):
    layer, site = probed
    x = torch.randn(ROWS, IN, requires_grad=True)
    dy = torch.randn(ROWS, OUT)
    layer(x)[0].backward(dy)
    w = layer.weight.detach()
    expected = {
        (0, "forward", "pre", "input"): x.detach(),
        (0, "forward", "pre", "weight"): w,
        (0, "forward", "post", "output"): x.detach() @ w.t(),
        (0, "backward", "pre", "grad_output"): dy,
        (0, "backward", "pre", "weight"): w,
        (0, "backward", "post", "grad_input"): dy @ w,
        (0, "backward", "post", "grad_weight"): dy.t() @ x.detach(),
    }
    assert site.rows.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(site.rows[key], tensor), key


def test_the_gradient_of_the_input_is_that_of_this_use(probed):
    """What enters a layernorm-linear is the residual stream, which goes on past it."""
    layer, site = probed
    x = torch.randn(ROWS, IN, requires_grad=True)
    (layer(x)[0].sum() + 5 * x.sum()).backward()
    of_layer = torch.ones(ROWS, OUT) @ layer.weight.detach()
    assert torch.equal(site.rows[0, "backward", "post", "grad_input"], of_layer)
    torch.testing.assert_close(x.grad, of_layer + 5)


def test_gradients_belong_to_their_own_forward_where_several_are_in_flight(probed):
    layer, site = probed
    inputs = [torch.randn(ROWS, IN, requires_grad=True) for _ in range(2)]
    outputs = []
    for site.moment, x in enumerate(inputs):
        outputs.append(layer(x)[0])
    site.moment = None
    for output in outputs:
        output.sum().backward()
    for moment, x in enumerate(inputs):
        assert torch.equal(site.rows[moment, "backward", "post", "grad_weight"], torch.ones(OUT, ROWS) @ x.detach())
    assert torch.equal(
        layer.weight.grad, torch.ones(OUT, ROWS) @ inputs[0].detach() + torch.ones(OUT, ROWS) @ inputs[1]
    )


def test_a_weight_gradient_that_goes_to_main_grad_is_not_shown(probed):
    layer, site = probed
    layer.fuse_wgrad_accumulation = True
    with pytest.warns(UserWarning, match="--no-gradient-accumulation-fusion makes a tensor of it"):
        te._attaches(te._probed_linear_forward)(layer, Probe(None, site))
    layer(torch.randn(ROWS, IN, requires_grad=True))[0].sum().backward()
    assert (0, "backward", "post", "grad_input") in site.rows
    assert (0, "backward", "post", "grad_weight") not in site.rows


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_a_gradient_that_nobody_needs_is_not_shown(probed, frozen):
    layer, site = probed
    layer.weight.requires_grad_(frozen != "weight")
    layer(torch.randn(ROWS, IN, requires_grad=frozen != "input"))[0].sum().backward()
    gradients = {name for _, operation, phase, name in site.rows if (operation, phase) == ("backward", "post")}
    assert gradients == {"grad_input", "grad_weight"} - {f"grad_{frozen}"}


def test_nothing_is_shown_when_nothing_is_kept_now(probed):
    layer, site = probed
    site.moment = None
    layer(torch.randn(ROWS, IN, requires_grad=True))[0].sum().backward()
    assert site.rows == {}


def test_a_weight_of_codes_is_shown_by_its_values(probed, low_precision):
    """And not in backward, where dgrad multiplies by other codes of it."""
    layer, site = probed
    values = layer.weight.detach().clone()
    layer.weight = torch.nn.Parameter(Codes(values), requires_grad=False)
    layer(torch.randn(ROWS, IN, requires_grad=True))[0].sum().backward()
    assert torch.equal(site.rows[0, "forward", "pre", "weight"], values)
    assert (0, "backward", "pre", "weight") not in site.rows


def test_stages(monkeypatch, low_precision):
    layer = SimpleNamespace(weight=torch.ones(2))
    for ranks, expected in ((1, {}), (2, {"output": "reduced"})):
        monkeypatch.setattr(te_kinds, "tensor_parallel_group", lambda _, n=ranks: SimpleNamespace(size=lambda: n))
        assert te_kinds._stages(layer, sums={"output"}, pre_norm=()) == {"stages": expected}
    layer.weight = Codes(torch.ones(2))
    assert te_kinds._stages(layer, sums=(), pre_norm={"input"}) == {
        "stages": {"input": "pre_norm", "weight": "dequantized"}
    }


def test_there_are_no_kinds_without_the_package(monkeypatch):
    monkeypatch.setattr(te, "HAVE_TE", False)
    assert te_kinds.te_kinds() == {}


def test_quantised_gemms_are_refused(probed):
    layer, site = probed
    quant = QuantConfig(quant_type="mxfp8").linear("decoder.layers.0.mlp.linear_fc1", 0, 1)
    with pytest.raises(
        ValueError, match="TransformerEngine's modules run GEMMs of their own, whose operands --quant-t"
    ):
        te._attaches(te._probed_linear_forward)(layer, Probe(quant, site))


def test_grouped_gemms_are_refused():
    with pytest.raises(ValueError, match=r"grouped GEMMs \(--moe-grouped-gemm\) are neither quantised nor kept"):
        te._refuse_probe(Layer(), Probe(None, Rows()))


def test_a_checkpointed_function_remembers_its_first_call(monkeypatch):
    monkeypatch.setattr(recompute.STATE, "session", SimpleNamespace(moment=None))
    monkeypatch.setattr(te, "_upstream_te_checkpoint", lambda function, *args, **options: (function, args, options))

    def forward(x):
        return x

    function, args, options = te.te_checkpoint(forward, False, "tracker", "group", 1, key=2)
    assert (args, options) == ((False, "tracker", "group", 1), {"key": 2})
    assert isinstance(function, recompute._Remembering)
    assert function(3) == 3
