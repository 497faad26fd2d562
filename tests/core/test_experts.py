"""Experts of a mixture: their names, how their tensors lie over ranks, and experts that get no token."""

import pytest
import torch

from megatron.core.instrumentation import instrument
from megatron.core.kinds import KINDS
from megatron.core.shards import Axes, shards
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.quantscope.gemm import QuantConfig


def recipe():
    return QuantConfig(quant_type="mxfp8")


# Experts: splits of features lie over the experts' own tensor-parallel ranks, and rows are no positions of a sequence.
EXPERT = {
    "linear_fc1": {
        "input": [], "weight": [{"over": "etp", "dim": 0, "pieces": 2}],
        "output": [{"over": "etp", "dim": -1, "pieces": 2}], "grad_input": [{"over": "etp", "reduce": "sum"}],
    },
    "linear_fc2": {
        "input": [{"over": "etp", "dim": -1}], "weight": [{"over": "etp", "dim": 1}],
        "output": [{"over": "etp", "reduce": "sum"}], "grad_output": [],
    },
}  # fmt: skip


class Mixture:
    """A part of TransformerConfig."""

    context_parallel_size = 2

    def __init__(self, expert_ranks):
        self.expert_model_parallel_size = expert_ranks


class Group:
    """Stands for a process group."""

    def __init__(self, ranks):
        self.size = lambda: ranks


@pytest.mark.parametrize("expert_ranks", [1, 2])
@pytest.mark.parametrize(("kind", "layer"), [(ColumnParallelLinear, "linear_fc1"), (RowParallelLinear, "linear_fc2")])
def test_shards_of_experts(kind, layer, expert_ranks):
    """Without expert parallelism each context-parallel rank has a copy, whose rows follow the others'."""
    axes = Axes.of_expert(Mixture(expert_ranks), Group(2))
    found = shards(KINDS[kind].layout, axes, pieces=2 if layer == "linear_fc1" else 1)
    for name, over_tensor in EXPERT[layer].items():
        copies = [] if name == "weight" or expert_ranks > 1 else [{"over": "cp", "dim": 0}]
        assert found.get(name, []) == [*over_tensor, *copies], name
    over_copies = [{"over": "cp", "reduce": "sum"}] if expert_ranks == 1 else []
    assert found["grad_weight"][1:] == over_copies


def test_experts_are_quantised_and_kept_by_their_global_names(one_rank, open_session):
    """16 experts, 2 tokens of 2 experts each: most get none, and are kept with no rows and gradients of zeros."""
    from megatron.training.arguments import arguments_with
    from megatron.training.model import build_model

    args = arguments_with(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=2, vocab_size=64, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, num_experts=16, moe_ffn_hidden_size=16, moe_layer_freq=[0, 1],
        moe_shared_expert_intermediate_size=16, use_cpu_initialization=True,
    )  # fmt: skip
    model, session = build_model(args), open_session()
    for mixture in (each for each in model.modules() if hasattr(each, "local_expert_indices")):
        mixture.local_expert_indices = [16 + local for local in range(16)]  # as the second of two expert ranks has them
    assert instrument([model], recipe=recipe(), session=session, num_layers=2) == 2 * 2 + 2 + 2 + (16 + 1) * 2
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    ids = torch.tensor([[3, 5]])
    model(ids, torch.arange(2)[None], None, labels=ids).sum().backward()
    rows = [(row, tensor) for row, tensor in session.rows if "local_experts" in row.module]
    numbers = {int(row.module.split(".")[6]) for row, _ in rows}
    assert numbers == set(range(16, 32))
    assert {row.layer_idx for row, _ in rows} == {1}
    assert all(row.routed for row, _ in rows)
    assert not any(row.routed for row, _ in session.rows if "local_experts" not in row.module)
    tokens = {row.module: tensor.shape[0] for row, tensor in rows if row.tensor_name == "input"}
    assert sum(tokens.values()) == 2 * 2 * 2  # tokens, experts of each, linears of each
    assert 0 in tokens.values()
    for row, tensor in rows:
        assert row.formats["fprop"]["x"] == "mxfp8"
        if row.tensor_name == "grad_weight":
            assert bool(tensor.any()) == (tokens[row.module] > 0)
