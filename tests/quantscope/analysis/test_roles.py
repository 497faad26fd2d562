import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.roles import GRADIENT, ROLES, module_label, role_of, site_order
from megatron.quantscope.capture.metadata import TENSOR_NAMES, gemm_of
from megatron.quantscope.gemm.operands import AttentionQuant, LinearQuant


def test_every_captured_tensor_has_a_role():
    assert {name for _, name in ROLES} == set(TENSOR_NAMES)
    assert len({role.symbol for role in ROLES.values()}) == len(ROLES)


def test_operands_are_what_goes_into_a_gemm():
    assert {role.symbol for role in ROLES.values() if role.operand} == {"x", "w", "dy", "q", "k", "v", "p", "do"}


def test_uses_are_the_gemms_that_training_quantises_the_operand_for():
    """Against the tables of the GEMMs themselves; ds is never whole, and so is never captured."""
    for quant, layer_type in ((LinearQuant, "linear"), (AttentionQuant, "attention")):
        roles = [role for (kind, _), role in ROLES.items() if kind == layer_type]
        found = {(use.gemm, role.symbol) for role in roles for use in role.uses}
        wanted = {(gemm, operand) for gemm, operands in quant.GEMMS.items() for operand in operands}
        assert found == {(gemm, operand) for gemm, operand in wanted if operand != "ds"}
    assert all(len(role.uses) in (0, 2) for role in ROLES.values())


def test_the_first_use_is_the_gemm_that_the_row_is_kept_for_first():
    for (layer_type, name), role in ROLES.items():
        operation = "backward" if name.startswith("grad") else "forward"
        if role.operand:
            assert role.uses[0].gemm in gemm_of(layer_type, operation, name).split("+")


def view(layer_type, name, use, shape, head_dim=None):
    x = torch.arange(float(np.prod(shape))).reshape(shape)
    return (x, *role_of(layer_type, name).cuts[use].view(x, head_dim))


def test_views_are_what_the_gemms_are_given():
    x, tokens, axis = view("linear", "input", 1, (5, 2, 7))
    assert (tuple(tokens.shape), axis) == ((10, 7), 0)
    assert torch.equal(tokens[3], x[1, 1])
    x, heads, axis = view("attention", "grad_output", 0, (5, 2, 12), 4)
    assert (tuple(heads.shape), axis) == ((5, 2, 3, 4), 3)
    assert torch.equal(heads[1, 1, 2], x[1, 1, 8:])
    assert view("attention", "attention_probs", 1, (2, 3, 4, 5))[2] == 2
    assert view("linear", "output", 0, (2, 3, 4))[2] == 2


@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 2, 12), (4, 0)])
def test_views_of_odd_shapes_lose_nothing(shape):
    for (layer_type, name), role in ROLES.items():
        for use in range(len(role.cuts)):
            x, seen, axis = view(layer_type, name, use, shape, 4)
            assert seen.numel() == x.numel()
            assert 0 <= axis < max(1, seen.dim())


def test_a_head_dim_that_does_not_fit_is_no_head_dim():
    for head_dim in (None, 0, 5):
        assert tuple(view("attention", "grad_output", 0, (5, 2, 12), head_dim)[1].shape) == (5, 2, 12)


def test_tensors_of_other_tools_are_named_by_themselves():
    role = role_of("moe", "grad_router_logits")
    assert (role.symbol, role.operand, role.family) == ("grad_router_logits", False, GRADIENT)


def test_labels_and_order_follow_the_forward_pass():
    assert module_label("decoder.layers.3.mlp.linear_fc2", "linear") == "fc2"
    assert module_label("decoder.layers.3.self_attention.core_attention", "attention") == "attn"
    assert module_label(None, "linear") == "linear"
    sites = ["router.x", "fc2.x", "qkv.dy", "attn.q", "qkv.x", "fc2.odd"]
    assert sorted(sites, key=site_order) == ["qkv.x", "qkv.dy", "attn.q", "fc2.x", "fc2.odd", "router.x"]
