"""Every mode of parallelism, quantised and captured: counts, coordinates, and losses against one rank.

One rank trains one iteration and saves. Every mode loads that checkpoint, so it begins in the middle of the stream of
samples, trains two more iterations quantised, and keeps two micro-batches of each. What has to be there is computed
from the model and the layout here, and never read off a run.
"""

from dataclasses import dataclass, field

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.full_tensor import full_tensor
from megatron.quantscope.formats import fake_quantize

LAYERS, HIDDEN, FFN, SEQUENCE, EXPERTS, EXPERT_FFN = 4, 64, 128, 128, 4, 64
SAVED, ITERATIONS, BATCH, KEPT = 1, 2, 4, 2  # iterations before and after the checkpoint, samples, micro-batches kept
QUANTISED = ["--quant-type", "mxfp8"]
SIZES = [
    *("--num-layers", LAYERS, "--ffn-hidden-size", FFN, "--seq-length", SEQUENCE),
    *("--max-position-embeddings", SEQUENCE, "--global-batch-size", BATCH, "--use-cpu-initialization"),
]
MIXTURE = [
    *("--num-experts", EXPERTS, "--moe-router-topk", 2, "--moe-ffn-hidden-size", EXPERT_FFN),
    *("--moe-aux-loss-coeff", 0.01, "--moe-z-loss-coeff", 0.001, "--moe-layer-freq", "[0,1,1,1]"),
    *("--moe-shared-expert-intermediate-size", 64, "--moe-token-dispatcher-type", "alltoall"),
]
FULL = ["--recompute-granularity", "full", "--recompute-num-layers", 1, "--recompute-method"]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LINEAR_ROWS, WEIGHT_ROWS, ATTENTION_ROWS = 7, 2, 8  # of a linear, those of them that are its weight, of an attention
GATHERED_LAYERS = 2 + 2  # rows of a layer that sequence parallelism makes whole: x of column-, dy of row-parallel ones
BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to spread the model over ranks, in Megatron's order tp-cp-dp-pp, innermost first.

    Attributes:
        flags: What asks for it.
        exact: Whether every GEMM is one rank's, and in the same order: losses agree in every printed digit.
        apart: Whether an expert's tokens of one GEMM of one rank are in several GEMMs here, or the other way round:
            blocks along tokens, which the weight gradient has, are cut elsewhere then.
        chunks: Model chunks of a pipeline stage.
        first: Layers of the first pipeline stage, where it has a number of its own.
    """

    flags: list = field(default_factory=list)
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    first: int | None = None
    exact: bool = False
    experts: bool = False
    apart: bool = False
    recomputed: bool = False

    @property
    def ranks(self):
        return self.tp * self.cp * self.dp * self.pp

    def of(self, rank):
        """(tp, cp, dp, pp) ranks."""
        tp, rest = rank % self.tp, rank // self.tp
        return tp, rest % self.cp, rest // self.cp % self.dp, rest // self.cp // self.dp

    def ep_rank(self, rank):
        return rank // self.etp % self.ep

    def layers(self, rank):
        """Global numbers of this rank's layers."""
        stage = self.of(rank)[3]
        if self.first is not None:
            return set(range(self.first)) if stage == 0 else set(range(self.first, LAYERS))
        each = LAYERS // (self.pp * self.chunks)
        return {layer for layer in range(LAYERS) if layer // each % self.pp == stage}

    def words(self):
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--context-parallel-size": self.cp,
            "--pipeline-model-parallel-size": self.pp,
            "--expert-model-parallel-size": self.ep,
        }
        return [word for flag, size in sizes.items() if size > 1 for word in (flag, size)] + self.flags


SEQUENCE_PARALLEL = ["--sequence-parallel"]
ALLGATHER = ["--moe-token-dispatcher-type", "allgather"]  # gloo can not do the other with experts that are split
INTERLEAVED = ["--num-layers-per-virtual-pipeline-stage", 1]
MODES = {
    "TP 2": Mode(tp=2),
    "TP 2 with sequence parallelism": Mode(tp=2, flags=SEQUENCE_PARALLEL),
    "PP 2": Mode(pp=2, exact=True),
    "PP 2 interleaved": Mode(pp=2, chunks=2, flags=INTERLEAVED, exact=True),
    "PP 2 uneven": Mode(pp=2, first=1, flags=["--decoder-first-pipeline-num-layers", 1], exact=True),
    "DP 2": Mode(dp=2),
    "DP 2 with overlaps": Mode(dp=2, flags=OVERLAP),
    "CP 2": Mode(cp=2),
    "full recompute, uniform": Mode(flags=[*FULL, "uniform"], exact=True, recomputed=True),
    "full recompute, block": Mode(flags=[*FULL, "block"], exact=True, recomputed=True),
    "selective recompute": Mode(flags=["--recompute-granularity", "selective"], exact=True),
    "TP 2 x PP 2": Mode(tp=2, pp=2),
    "TP 2 x CP 2": Mode(tp=2, cp=2, flags=SEQUENCE_PARALLEL),
    "PP 2 interleaved x DP 2 with overlaps": Mode(pp=2, dp=2, chunks=2, flags=[*INTERLEAVED, *OVERLAP]),
    "experts on one rank": Mode(experts=True, exact=True),
    "EP 2": Mode(dp=2, ep=2, experts=True, apart=True),
    "CP 2 with experts": Mode(cp=2, experts=True, apart=True),
    "TP 2 x EP 2": Mode(tp=2, dp=2, ep=2, etp=2, flags=[*SEQUENCE_PARALLEL, *ALLGATHER], experts=True, apart=True),
    "TP 2, EP 2, experts whole": Mode(
        tp=2, ep=2, flags=[*SEQUENCE_PARALLEL, "--expert-tensor-parallel-size", 1], experts=True
    ),
    "experts, interleaved": Mode(pp=2, chunks=2, flags=INTERLEAVED, experts=True, exact=True),
}
QUICK = ("PP 2 interleaved", "EP 2")
# Blocks of 32 are cut as one rank cuts them, but sums over ranks are added in another order, so that a value can fall
# on the other side of a rounding boundary of the format now and then. Losses are printed with six decimals.
LOSS_TOLERANCE = 1e-5
APART_TOLERANCE = 5e-4  # where blocks along tokens are cut elsewhere
STRADDLED_TOLERANCE = 3e-4
UNQUANTISED_TOLERANCE = 1e-4
WITHOUT_WGRAD = ["--quant-operands", "x", "w", "dy", "fprop", "dgrad"]
# Operands of a linear -> the dimensions that its GEMMs contract: features, and tokens or rows of the weight.
CONTRACTED = dict.fromkeys([("forward", "input"), ("forward", "weight"), ("backward", "grad_output")], (-1, 0))
CONTRACTED |= dict.fromkeys([("forward", "query"), ("forward", "key")], (-1, 0)) | {("forward", "value"): (0,)}


@pytest.fixture(scope="module")
def one_rank(train, tmp_path_factory):
    """`one_rank(experts, *flags)` -> losses of the two iterations after the checkpoint, and where that is."""
    checkpoints, losses = {}, {}

    def run(experts, *flags):
        if experts not in checkpoints:
            directory = checkpoints[experts] = tmp_path_factory.mktemp("checkpoint")
            train(*model_of(experts), "--save", directory, "--save-interval", SAVED, "--exit-interval", SAVED)
        if (experts, flags) not in losses:
            losses[experts, flags] = train(*model_of(experts), *load(checkpoints[experts]), *flags).losses
        return losses[experts, flags], checkpoints[experts]

    return run


@pytest.fixture(scope="module")
def kept(train, one_rank, tmp_path_factory):
    """`kept(name)` -> (losses, capture) of a mode, quantised."""
    runs = {}

    def run(name):
        if name not in runs:
            mode, directory = MODES[name], tmp_path_factory.mktemp("capture")
            _, checkpoint = one_rank(mode.experts, *QUANTISED)
            keep = ["--save-tensors", "--tensor-save-dir", directory, "--control-iter", ITERATIONS]
            flags = [*model_of(mode.experts), *load(checkpoint), *QUANTISED, *keep, "--collect-micro-batches", KEPT]
            runs[name] = train(*flags, *mode.words(), ranks=mode.ranks).losses, open_capture(directory)
        return runs[name]

    return run


def model_of(experts):
    return SIZES + MIXTURE if experts else SIZES


def load(checkpoint):
    return ["--load", checkpoint, "--no-load-optim", "--no-load-rng"]


def modes(names):
    """Those that are quick, and the others marked."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix, id=name) for name in names]


def linears_of(mode, rank):
    """Full name of every linear layer of this rank -> whether its weights are split along their output (column)."""
    each = EXPERTS // mode.ep
    experts = range(mode.ep_rank(rank) * each, (mode.ep_rank(rank) + 1) * each)
    found = {}
    for layer in mode.layers(rank):
        name = f"decoder.layers.{layer}"
        found |= {f"{name}.self_attention.linear_qkv": True, f"{name}.self_attention.linear_proj": False}
        mixture = [*(f"experts.local_experts.{expert}." for expert in experts), "shared_experts."]
        for mlp in mixture if mode.experts and layer > 0 else [""]:
            found |= {f"{name}.mlp.{mlp}linear_fc1": True, f"{name}.mlp.{mlp}linear_fc2": False}
    return found


def rows_of(mode, rank):
    """Every row of one micro-batch on this rank: (module, operation, phase, tensor name)."""
    linear = [
        *(("forward", "pre", name) for name in ("input", "weight")),
        ("forward", "post", "output"),
        *(("backward", "pre", name) for name in ("grad_output", "weight")),
        *(("backward", "post", name) for name in ("grad_input", "grad_weight")),
    ]
    tensors = ("query", "key", "value")
    attention = [
        *(("forward", "pre", name) for name in tensors),
        ("forward", "post", "output"),
        ("backward", "pre", "grad_output"),
        *(("backward", "post", f"grad_{name}") for name in tensors),
    ]
    gathered = {True: "input", False: "grad_output"}
    found = {
        (f"decoder.layers.{layer}.self_attention.core_attention", *row)
        for layer in mode.layers(rank)
        for row in attention
    }
    for name, column in linears_of(mode, rank).items():
        group_rank = mode.of(rank)[0] if "local_experts" not in name else rank % mode.etp
        elsewhere = gathered[column] if "--sequence-parallel" in mode.flags and group_rank > 0 else None
        found |= {(name, *row) for row in linear if row[2] != elsewhere}
    return found


def moments_of(mode, rank):
    """(iteration, micro-batch, samples) of all that a rank keeps, as the sampler deals samples out."""
    dp = mode.of(rank)[2]
    return {
        (iteration, micro_batch, (iteration * BATCH + micro_batch * mode.dp + dp,))
        for iteration in range(SAVED, SAVED + ITERATIONS)
        for micro_batch in range(KEPT)
    }


@pytest.mark.parametrize("name", modes(MODES))
def test_what_is_kept_is_what_the_layout_holds(kept, name):
    mode, (_, capture) = MODES[name], kept(name)
    assert not capture.problems
    for rank in range(mode.ranks):
        records = [record for record in capture.records if record.rank == rank]
        found = [(r.iteration, r.micro_batch, r.sample_indices, *row_of(r)) for r in records]
        expected = {(*moment, *row) for moment in moments_of(mode, rank) for row in rows_of(mode, rank)}
        assert set(found) == expected
        assert len(found) == len(expected)
        weights = len(linears_of(mode, rank))  # written once a step, however often it is shown
        files = ITERATIONS * (KEPT * (len(rows_of(mode, rank)) - WEIGHT_ROWS * weights) + weights)
        assert sum(not record.reference for record in records) == files
        places = {
            (r.parallel["tp_rank"], r.parallel["cp_rank"], r.parallel["dp_rank"], r.parallel["pp_rank"])
            for r in records
        }
        assert places == {mode.of(rank)}
        assert {(r.parallel["ep_rank"], r.parallel["ep_size"]) for r in records} == {(mode.ep_rank(rank), mode.ep)}
        assert {r.layer_idx for r in records} == mode.layers(rank)


def row_of(record):
    return record.module, record.operation, record.phase, record.tensor_name


@pytest.mark.parametrize("name", modes(MODES))
def test_losses_are_those_of_one_rank(kept, one_rank, name):
    mode, (losses, _) = MODES[name], kept(name)
    expected, _ = one_rank(mode.experts, *QUANTISED)
    assert len(losses) == ITERATIONS
    if mode.exact:
        assert losses == expected
    else:
        agree(losses, expected, APART_TOLERANCE if mode.apart else LOSS_TOLERANCE)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.apart])
def test_only_blocks_along_tokens_are_cut_elsewhere(train, one_rank, name):
    """Without quantised weight gradients the losses of experts agree as closely as those of other modes."""
    mode, flags = MODES[name], (*QUANTISED, *WITHOUT_WGRAD)
    expected, checkpoint = one_rank(True, *flags)
    losses = train(*model_of(True), *load(checkpoint), *flags, *mode.words(), ranks=mode.ranks).losses
    agree(losses, expected, LOSS_TOLERANCE)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if not mode.exact])
def test_losses_agree_unquantised(train, one_rank, name):
    mode = MODES[name]
    expected, checkpoint = one_rank(mode.experts)
    losses = train(*model_of(mode.experts), *load(checkpoint), *mode.words(), ranks=mode.ranks).losses
    agree(losses, expected, UNQUANTISED_TOLERANCE)


def agree(losses, expected, tolerance):
    assert list(map(float, losses)) == pytest.approx(list(map(float, expected)), abs=tolerance)


@dataclass(frozen=True)
class Quantised:
    """A capture whose tensors are quantised as each rank does it, before they are put together."""

    capture: object
    axis: int

    @property
    def logical(self):
        return self.capture.logical

    def load(self, record):
        return fake_quantize(self.capture.load(record), "mxfp8", axis=self.axis)


def straddled(capture):
    """{(last name of the module, tensor, dimension)} of split operands whose blocks are not those of one rank."""
    found = set()
    for record in capture.logical:
        split = record.shard and not any("reduce" in each for each in record.shard)
        for axis in CONTRACTED.get((record.operation, record.tensor_name), ()) if split else ():
            whole = fake_quantize(full_tensor(capture, record, unscaled=False), "mxfp8", axis=axis)
            if not torch.equal(whole, full_tensor(Quantised(capture, axis), record, unscaled=False)):
                found.add((record.module.rpartition(".")[2], record.tensor_name, axis))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.tp * mode.cp > 1])
def test_no_block_straddles_a_shard(kept, name):
    """Every rank's quantised parts, put together, are the quantised whole: bit for bit, along every GEMM's axis."""
    elsewhere = set()
    if name == "CP 2 with experts":  # whose rows are those of one rank's tokens, however many these are
        elsewhere = {
            (linear, tensor, 0) for linear in ("linear_fc1", "linear_fc2") for tensor in ("input", "grad_output")
        }
    assert straddled(kept(name)[1]) == elsewhere


@pytest.mark.matrix
def test_where_blocks_straddle_shards(train, tmp_path):
    """An MLP of width 96 over two ranks: 48 are a block and a half."""
    flags = [*SIZES, *QUANTISED, "--ffn-hidden-size", 96]
    keep = ["--save-tensors", "--tensor-save-dir", tmp_path, "--control-iter", 3]
    one, two = train(*flags), train(*flags, *keep, *MODES["TP 2"].words(), ranks=2)
    assert straddled(open_capture(tmp_path)) == {
        ("linear_fc2", "input", -1),
        ("linear_fc2", "weight", -1),
        ("linear_fc1", "weight", 0),
        ("linear_fc1", "grad_output", -1),
    }
    assert len(two.losses) == 3
    agree(two.losses, one.losses, STRADDLED_TOLERANCE)
