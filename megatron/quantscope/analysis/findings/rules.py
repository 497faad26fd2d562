"""The table of rules. To add one, write a function from a study to findings, and a line here.

Of a capture that kept statistics alone (`--tensor-save-mode statistics`) most rules find nothing because they can not
look: `unseen` says which, so that an empty list is not taken for a clean bill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron.quantscope.analysis.findings.channels import find_massive_activations, find_outlier_channels
from megatron.quantscope.analysis.findings.finding import Finding, ranked
from megatron.quantscope.analysis.findings.format_losses import find_format_losses
from megatron.quantscope.analysis.findings.nonfinite import find_nonfinite
from megatron.quantscope.analysis.findings.precision import find_layers_to_keep
from megatron.quantscope.analysis.findings.ranks import find_rank_disagreement
from megatron.quantscope.analysis.findings.runs import find_divergence, find_loss_differences
from megatron.quantscope.analysis.findings.words import counted, listed
from megatron.quantscope.analysis.study import Study


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        find: What looks.
        subject: What for, as a part of a sentence.
        needs_tensors: Whether a tensor's statistics are not enough.
    """

    find: Callable[[Study], Iterable[Finding]]
    subject: str
    needs_tensors: bool = True


RULES = (
    Rule(find_nonfinite, "NaN and Inf", needs_tensors=False),
    Rule(find_rank_disagreement, "copies on ranks that differ", needs_tensors=False),
    Rule(find_massive_activations, "massive activations"),
    Rule(find_format_losses, "what formats clip or make zero"),
    Rule(find_layers_to_keep, "layers to keep in higher precision"),
    Rule(find_divergence, "where runs part"),
    Rule(find_loss_differences, "losses that differ", needs_tensors=False),
    Rule(find_outlier_channels, "outlier channels"),
)


def find(study: Study) -> list[Finding]:
    """What stands out in a capture, at most `MOST_SHOWN` findings, the most severe first."""
    if study.summary.empty:
        return []
    return ranked(finding for rule in RULES for finding in rule.find(study))


def unseen(study: Study) -> str:
    """What could not be looked for because tensors were not kept, in a sentence; empty where all of them were."""
    without = int(study.summary["file"].isna().sum())
    if not without:
        return ""
    subjects = [rule.subject for rule in RULES if rule.needs_tensors]
    which = "this capture" if without == len(study.summary) else f"{counted(without, 'row')} of this capture"
    return f"Of {which} statistics alone were kept: they do not show {listed(subjects, len(subjects))}."
