"""run_tensor_collection.sh: train with quantised GEMMs and keep the tensors that went in and came out.

check the command line -> enter the environment -> prepare inputs -> plan -> train each type -> table
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from script.data.command_line import FAILED, WRONG_USAGE
from script.driver import trainer
from script.driver.inputs import BadInput
from script.driver.options import BATCH_TYPES, COLLECTION, Options
from script.driver.preparation import Given, open_given, prepare
from script.driver.program import run_program

if TYPE_CHECKING:
    from script.driver.display import Display

SINGLE, BATCH, QUICK = COLLECTION.mode_names
QUICK_HAS_ITS_OWN = ("checkpoint_path", "tokenizer_path", "data_path")


def check(options: Options) -> Given:
    """Check what can be checked before anything is set up.

    Raises:
        BadInput: One line for the first thing that is wrong.
    """
    if options.mode == BATCH and options.quant_type is not None:
        raise BadInput(f"batch runs {', '.join(BATCH_TYPES)}; for {options.quant_type} alone, use single")
    if options.mode == QUICK:
        for name in QUICK_HAS_ITS_OWN:
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise BadInput(f"quick has a small model and data of its own: leave {flag} out, or use single")
    trainer.check_flags(options)
    return open_given(options)


def collect(options: Options, given: Given, display: Display) -> int:
    """Collect every type of the mode, one after the other; a failed one does not keep the others from running.

    Returns:
        The exit code.

    Raises:
        BadInput, InputError, OSError: Nothing could be started.
    """
    from script.driver.summary import announce, require_space, summarise
    from script.driver.training import Outcome, job, rehearse, run

    types = BATCH_TYPES if options.mode == BATCH else (options.quant_type or options.default_type,)
    inputs = trainer.QUICK_INPUTS if options.mode == QUICK else prepare(given, options.dtype, display.say)
    jobs = [job(options, quant_type, inputs) for quant_type in types]
    if jobs[0].arguments.tensor_dry_run:  # the trainer counts better than the plan, and nothing is collected
        return _exit_code(rehearse(ready, display) for ready in jobs)
    announce(jobs, display)
    require_space(jobs)
    outcomes = []
    for ready in jobs:
        try:
            outcome = run(ready, options, display)
        except OSError as error:  # its folder can not be written; another type's may
            outcome = Outcome(quant_type=ready.quant_type, failure=str(error), exit_code=FAILED)
        outcomes.append(outcome)
        if outcome.failure is not None:
            display.complain(f"{COLLECTION.name}: error: {ready.quant_type}: {outcome.failure}")
    summarise(outcomes, jobs, display)
    return _exit_code(outcome.exit_code for outcome in outcomes)


def _exit_code(of_runs: Iterable[int]) -> int:
    """That of all runs together."""
    codes = set(of_runs) - {0}
    return WRONG_USAGE if codes == {WRONG_USAGE} else FAILED if codes else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with the arguments after its name."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_program(COLLECTION, "script.driver.collection", arguments, check=check, body=collect)


if __name__ == "__main__":
    sys.exit(main())
