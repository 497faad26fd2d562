"""Two ranks that share each sequence train as one does, also where the halves of a sequence are not alike."""

import pytest

from tests.training.log_lines import values

CONTEXT = ["--context-parallel-size", 2]
# Steps large enough that a gradient which is wrong in one norm moves the next loss by more than the tolerance.
FLAGS = ["--use-cpu-initialization", "--quant-type", "none", "--lr", 1e-2]
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 2e-3  # norms are printed with three decimals
# Documents end within the samples: tokens then do not count, are hidden, and begin at position 0 again.
DOCUMENTS = ["--eod-mask-loss", "--reset-attention-mask", "--reset-position-ids", "--position-embedding-type"]
SAVED = 2


def numbers(run, name):
    return [float(value) for value in values(run, name)]


@pytest.mark.parametrize(
    "flags",
    [
        [*DOCUMENTS, "learned_absolute"],
        [*DOCUMENTS, "rope", "--calculate-per-token-loss", "--use-distributed-optimizer"],
    ],
    ids=["mean of each micro-batch", "mean over tokens"],
)
def test_documents_that_end_within_a_sequence(train, flags):
    one, two = train(*FLAGS, *flags), train(*FLAGS, *flags, *CONTEXT, ranks=2)
    assert len(set(one.losses)) == 3
    assert numbers(two, "lm loss") == pytest.approx(numbers(one, "lm loss"), abs=LOSS_TOLERANCE)
    assert numbers(two, "grad norm") == pytest.approx(numbers(one, "grad norm"), abs=NORM_TOLERANCE)


def test_a_resumed_run_repeats_every_digit(train, tmp_path):
    """Each rank goes on with the random state that it had."""
    flags = [*FLAGS, *CONTEXT, "--attention-dropout", 0.1, "--hidden-dropout", 0.1]
    whole = train(*flags, "--save", tmp_path, "--save-interval", SAVED, ranks=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = train(*flags, "--load", tmp_path, ranks=2)
    assert "weights, optimizer and schedules, random state\n" in resumed.output
    assert resumed.losses == whole.losses[SAVED:]
    assert values(resumed, "grad norm") == values(whole, "grad norm")[SAVED:]
