"""Which optimizer's state goes into which: by what the layouts of the state have in common."""

import pytest

from megatron.training.checkpoint.optimizer_traits import require_same_traits, traits_of
from megatron.training.failure import UsageError

FLAGS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "sgd": {"optimizer": "sgd"},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0},
    "decoupled": {"decoupled_lr": 1e-3},
}
PLAIN, BUFFERS, ANY = None, "dp_reshardable", "fully_reshardable"
ALLOWED = {  # besides that of its own; measured by loading each into each
    PLAIN: {("bf16", "fp16"), ("fp16", "bf16")},
    BUFFERS: set(),
    ANY: {(one, other) for one in ("fp32", "bf16", "fp16") for other in ("fp32", "bf16", "fp16") if one != other},
}


@pytest.mark.parametrize("sharding", ALLOWED)
@pytest.mark.parametrize("here", FLAGS)
@pytest.mark.parametrize("there", FLAGS)
def test_each_into_each(parse, tmp_path, there, here, sharding):
    stored, args = traits_of(parse(**FLAGS[there])), parse(**FLAGS[here])
    if there == here or (there, here) in ALLOWED[sharding]:
        require_same_traits(args, tmp_path, stored, sharding)
    else:
        with pytest.raises(UsageError, match=r"there and .* here\); --no-load-optim takes weights and progress"):
            require_same_traits(args, tmp_path, stored, sharding)


@pytest.mark.parametrize("here", FLAGS)
def test_a_checkpoint_that_does_not_say_is_not_refused(parse, tmp_path, here):
    """As those of earlier versions."""
    require_same_traits(parse(**FLAGS[here]), tmp_path, {}, PLAIN)
