"""The table of rules. To add one, write a function from a study to findings, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron.quantscope.analysis.findings.channels import find_massive_activations, find_outlier_channels
from megatron.quantscope.analysis.findings.finding import Finding, ranked
from megatron.quantscope.analysis.findings.format_losses import find_format_losses
from megatron.quantscope.analysis.findings.nonfinite import find_nonfinite
from megatron.quantscope.analysis.findings.precision import find_layers_to_keep
from megatron.quantscope.analysis.findings.ranks import find_rank_disagreement
from megatron.quantscope.analysis.findings.runs import find_divergence, find_loss_differences
from megatron.quantscope.analysis.study import Study

RULES: tuple[Callable[[Study], Iterable[Finding]], ...] = (
    find_nonfinite,
    find_rank_disagreement,
    find_massive_activations,
    find_format_losses,
    find_layers_to_keep,
    find_divergence,
    find_loss_differences,
    find_outlier_channels,
)


def find(study: Study) -> list[Finding]:
    """What stands out in a capture, at most `MOST_SHOWN` findings, the most severe first."""
    if study.summary.empty:
        return []
    return ranked(finding for rule in RULES for finding in rule(study))
