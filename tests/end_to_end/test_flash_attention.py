"""`--attention-backend flash` through the trainer, in several layouts: it keeps what unfused attention keeps."""

import pytest
import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.full_tensor import logical_key

pytestmark = pytest.mark.matrix
LAYOUTS = {
    "one rank": (1, []),
    "CP 2": (2, ["--context-parallel-size", 2]),
    "TP 2": (2, ["--tensor-model-parallel-size", 2, "--sequence-parallel"]),
    "recomputed": (1, ["--recompute-granularity", "selective"]),
}
ITERATIONS = 3


@pytest.fixture(scope="module")
def kept(train, tmp_path_factory):
    """`kept(*flags, ranks=1)` -> (losses, capture) of a run."""

    def run(*flags, ranks=1):
        directory = tmp_path_factory.mktemp("kept")
        keep = ["--save-tensors", "--tensor-save-dir", directory, "--control-iter", ITERATIONS]
        return [float(loss) for loss in train(*keep, *flags, ranks=ranks).losses], open_capture(directory)

    return run


@pytest.fixture(scope="module")
def unfused(kept):
    return kept("--attention-backend", "unfused")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_keeps_what_unfused_attention_keeps(kept, unfused, layout):
    ranks, flags = LAYOUTS[layout]
    losses, capture = kept("--attention-backend", "flash", *flags, ranks=ranks)
    assert losses == pytest.approx(unfused[0], rel=1e-4)
    expected = {logical_key(record): record for record in unfused[1].records}
    assert {logical_key(record) for record in capture.records} == expected.keys()
    for record in capture.records:
        if record.iteration == 0:
            whole, reference = capture.full_tensor(record), unfused[1].load(expected[logical_key(record)])
            torch.testing.assert_close(whole, reference, rtol=1e-3, atol=1e-5, msg=str(logical_key(record)))
