"""What a training run printed, by name, as text to compare to the digit."""

import re


def iterations(run) -> list[int]:
    """The iterations that `run` reported, in order."""
    return [int(number) for number in re.findall(r"iteration +(\d+)/", run.output)]


def values(run, name: str) -> list[str]:
    """What stands behind `name` in every line of an iteration."""
    return re.findall(rf"\| {name}: +(\S+)", run.output)
