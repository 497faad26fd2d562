"""What stands out in a capture, in words: a short list, the most severe first, each with numbers and a figure.

`find(study)` walks the table `rules.RULES`. A rule looks at one kind of thing and says what a reader would otherwise
have to see for himself in one of fifty figures. What random numbers without any structure show as well is no finding:
thresholds are named constants that stand beside their reasons, and those of formats are relative to what the format
does to Gaussian data (`reference`).
"""

from megatron.quantscope.analysis.findings.finding import KINDS, MOST_SHOWN, SEVERITIES, Finding, Place
from megatron.quantscope.analysis.findings.rules import find, unseen

__all__ = ["KINDS", "MOST_SHOWN", "SEVERITIES", "Finding", "Place", "find", "unseen"]
