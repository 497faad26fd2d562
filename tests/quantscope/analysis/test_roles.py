from megatron.quantscope.analysis.roles import ROLES, module_label, role_of, site_order
from megatron.quantscope.capture.metadata import TENSOR_NAMES


def test_every_captured_tensor_has_a_role():
    assert {name for _, name in ROLES} == set(TENSOR_NAMES)
    assert len({role.symbol for role in ROLES.values()}) == len(ROLES)


def test_operands_are_what_goes_into_a_gemm():
    assert {role.symbol for role in ROLES.values() if role.operand} == {"x", "w", "dy", "q", "k", "v", "p", "do"}


def test_a_value_is_cut_along_the_keys_and_all_else_along_its_last_axis():
    assert {role.symbol: role.contraction for role in ROLES.values() if role.contraction != -1} == {"v": 0}


def test_tensors_of_other_tools_are_named_by_themselves():
    role = role_of("moe", "grad_router_logits")
    assert (role.symbol, role.operand, role.is_gradient) == ("grad_router_logits", False, True)


def test_labels_and_order_follow_the_forward_pass():
    assert module_label("decoder.layers.3.mlp.linear_fc2", "linear") == "fc2"
    assert module_label("decoder.layers.3.self_attention.core_attention", "attention") == "attn"
    assert module_label(None, "linear") == "linear"
    sites = ["router.x", "fc2.x", "qkv.dy", "attn.q", "qkv.x", "fc2.odd"]
    assert sorted(sites, key=site_order) == ["qkv.x", "qkv.dy", "attn.q", "fc2.x", "fc2.odd", "router.x"]
