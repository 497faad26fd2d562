"""`--transformer-impl transformer_engine` through the trainer, with a stand-in for TransformerEngine on the CPU.

The stand-in has TransformerEngine's signatures, and its structure as far as capture meets it (one autograd function a
layer, that gathers and reduces); it can not say that TransformerEngine itself behaves so. test_on_a_gpu.py does.
"""

import re
from collections import Counter

import pytest
import torch
from torch.nn.functional import rms_norm

from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.full_tensor import logical_key
from tests.end_to_end.conftest import LAYERS, MODEL_FLAGS
from tests.end_to_end.forked_ranks import ForkedTrainer

ENGINE = ["--transformer-impl", "transformer_engine"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", 2]
SEQUENCE_PARALLEL = [*TENSOR_PARALLEL, "--sequence-parallel"]
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
UNTRAINED = ["--train-iters", 1, "--lr", 1e-12, "--min-lr", 0, "--save-interval", 1]
COLUMN, ROW, PRE_NORM = ("linear_qkv", "linear_fc1"), ("linear_proj", "linear_fc2"), "pre_norm"
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
SUM_ORDER = 1e-4  # of losses that differ by the order of their sums


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """`train(*flags, ranks=1)` -> the losses that the run printed; all runs begin with what local layers have saved.

    Random weights would differ from one layout to the other.
    """
    weights = tmp_path_factory.mktemp("weights")
    with ForkedTrainer("tests.core.extensions.stand_in_server") as trainer:
        trainer.run(*MODEL_FLAGS, *UNTRAINED, "--save", weights)

        def run(*flags, ranks=1):
            output = trainer.run(*MODEL_FLAGS, "--load", weights, "--finetune", *flags, ranks=ranks)
            return re.findall(r"lm loss: (\S+)", output)

        yield run


@pytest.fixture(scope="module")
def kept(train, tmp_path_factory):
    """`kept(*flags, ranks=1)` -> (losses, capture) of a run that keeps everything; made once."""
    runs = {}

    def run(*flags, ranks=1):
        key = tuple(map(str, flags))
        if key not in runs:
            directory = tmp_path_factory.mktemp("kept")
            amount = ["--control-iter", 3, "--collect-micro-batches", 2]
            keep = ["--save-tensors", "--tensor-save-dir", directory, *amount]
            runs[key] = train(*ENGINE, *keep, *flags, ranks=ranks), open_capture(directory)
        return runs[key]

    return run


def modules_of(capture):
    """{(iteration, micro-batch, module): {(operation, tensor name): record}} of a capture of one rank."""
    found = {}
    for record in capture.records:
        place = found.setdefault((record.iteration, record.micro_batch, record.module), {})
        place[record.operation, record.tensor_name] = record
    return found


def test_the_model_is_that_of_the_local_layers_and_capture_changes_no_bit(train, kept):
    plain = train(*ENGINE)
    assert kept()[0] == plain
    local = train("--transformer-impl", "local")
    assert [float(loss) for loss in plain] == pytest.approx([float(loss) for loss in local], rel=SUM_ORDER)


def test_every_tensor_is_kept_once(kept):
    _, capture = kept()
    assert not capture.problems
    linear = {
        ("forward", "pre", "input"),
        ("forward", "pre", "weight"),
        ("forward", "post", "output"),
        ("backward", "pre", "grad_output"),
        ("backward", "pre", "weight"),
        ("backward", "post", "grad_input"),
        ("backward", "post", "grad_weight"),
    }
    attention = {("forward", "pre", name) for name in ("query", "key", "value")} | {("forward", "post", "output")}
    attention |= {("backward", "pre", "grad_output")}
    attention |= {("backward", "post", f"grad_{name}") for name in ("query", "key", "value")}
    expected = Counter(
        (iteration, micro_batch, f"decoder.layers.{layer}.{module}", *row)
        for iteration in range(3)
        for micro_batch in range(2)
        for layer in range(LAYERS)
        for module, rows in {
            "self_attention.linear_qkv": linear,
            "self_attention.linear_proj": linear,
            "self_attention.core_attention": attention,
            "mlp.linear_fc1": linear,
            "mlp.linear_fc2": linear,
        }.items()
        for row in rows
    )
    found = Counter(
        (r.iteration, r.micro_batch, r.module, r.operation, r.phase, r.tensor_name) for r in capture.records
    )
    assert found == expected


def test_the_values_are_those_of_the_gemms(kept):
    """y = x wT, dx = dy w, dw = dyT x; x is the norm of the input of a layernorm-linear, and weights of norms are 1."""
    _, capture = kept()
    checked = 0
    for (iteration, _, module), rows in modules_of(capture).items():
        if iteration > 0 or module.endswith("core_attention"):
            continue  # a step changes the weights of the norms, which are not kept
        x, w, y = (capture.load(rows["forward", name]) for name in ("input", "weight", "output"))
        dy, dx, dw = (capture.load(rows["backward", name]) for name in ("grad_output", "grad_input", "grad_weight"))
        x.requires_grad_()
        w.requires_grad_()
        operand = rms_norm(x, x.shape[-1:], eps=1e-5) if module.endswith(COLUMN) else x
        expected = operand @ w.t()
        torch.testing.assert_close(y, expected, **CLOSE)
        torch.testing.assert_close((dx, dw), torch.autograd.grad(expected, (x, w), dy), **CLOSE)
        checked += 1
    assert checked == 2 * 4 * LAYERS


def test_stages_on_one_rank(kept):
    _, capture = kept()
    stages = {(r.module.rpartition(".")[2], r.tensor_name): (r.stage, r.gemm) for r in capture.records}
    for module in COLUMN:
        assert stages[module, "input"] == stages[module, "grad_input"] == (PRE_NORM, None)
    assert {stage for (module, name), stage in stages.items() if module in ROW and name == "output"} == {
        ("complete", "fprop")
    }
    assert all(record.shard == () for record in capture.records)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(TENSOR_PARALLEL, marks=pytest.mark.matrix, id="TP 2"),
        pytest.param(SEQUENCE_PARALLEL, id="TP 2 with sequence parallelism"),
        pytest.param(["--pipeline-model-parallel-size", 2], marks=pytest.mark.matrix, id="PP 2"),  # two in flight
    ],
)
def test_two_ranks_keep_the_shards_of_what_one_keeps(kept, how):
    (losses, capture), (one_losses, one) = kept(*how, ranks=2), kept()
    assert [float(loss) for loss in losses] == pytest.approx([float(loss) for loss in one_losses], rel=SUM_ORDER)
    expected = {logical_key(record): record for record in one.records}
    assert {logical_key(record) for record in capture.records} == expected.keys()
    for record in capture.records:
        if record.iteration == 0:
            whole, reference = capture.full_tensor(record), one.load(expected[logical_key(record)])
            torch.testing.assert_close(whole, reference, rtol=1e-3, atol=1e-5, msg=str(logical_key(record)))


def test_stages_and_slices_of_two_ranks(kept):
    _, capture = kept(*SEQUENCE_PARALLEL, ranks=2)
    found = {(r.module.rpartition(".")[2], r.operation, r.tensor_name): r for r in capture.records}
    slices = [{"over": "tp", "dim": 0}]
    for module in ROW:
        record = found[module, "forward", "output"]
        assert (record.stage, list(record.shard)) == ("reduced", slices)
        assert list(found[module, "backward", "grad_output"].shard) == slices
        assert list(found[module, "backward", "grad_weight"].shard) == [{"over": "tp", "dim": 1}]
    for module in COLUMN:
        assert [found[module, operation, name].stage for operation, name in (("forward", "input"),)] == [PRE_NORM]
        assert list(found[module, "forward", "input"].shard) == slices
    assert found["linear_fc1", "forward", "output"].shard[0] == {"over": "tp", "dim": -1, "pieces": 2}
    assert {record.rank for record in capture.records} == {0, 1}


def test_operands_are_in_high_precision_under_fp8(kept):
    """The stand-in rounds the operands of its GEMMs to FP8: what it gives shows that, what goes in does not."""
    (losses, capture), (plain, _) = kept(*FP8), kept()
    assert losses != plain
    rows = modules_of(capture)[0, 0, "decoder.layers.0.mlp.linear_fc2"]
    x, w, y = (capture.load(rows["forward", name]) for name in ("input", "weight", "output"))
    error = (y - x @ w.t()).norm() / y.norm()
    assert 1e-3 < error < 0.1
    assert len(x.unique()) > x.numel() / 2  # FP8 has 253 values


def test_a_recomputed_forward_is_kept_once(kept):
    """Under FP8 megatron-core recomputes through TransformerEngine's own checkpoint."""
    (losses, capture), (plain, once) = kept(*FP8, *RECOMPUTE), kept(*FP8)
    assert losses == plain
    expected = {logical_key(record): record for record in once.records}
    assert Counter(map(logical_key, capture.records)) == Counter(expected.keys())
    for record in capture.records:
        assert record.recomputed
        assert torch.equal(capture.load(record), once.load(expected[logical_key(record)])), logical_key(record)
