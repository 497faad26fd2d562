"""`report`: the analysis and the page of it, without the figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.quantscope.report.commands.opening import DONE, FAILED, analysed, complain


def run(options: argparse.Namespace) -> int:
    """Write report.html; 1 where something could not be read, the last line is the path to open."""
    from megatron.quantscope.analysis.errors import AnalysisError, told_in_one_line
    from megatron.quantscope.report.draw import PAGE
    from megatron.quantscope.report.html.build import write_report

    target = Path(options.output_dir)
    try:
        study = analysed(options, target)
        with told_in_one_line(target, workers=1):
            page = write_report(study, target / PAGE)
    except AnalysisError as error:
        return complain(str(error), FAILED)
    code = DONE
    if study.problems:
        code = complain(f"{len(study.problems)} problems; the first: {study.problems[0]}", FAILED)
    print(page)
    return code
