"""Captures at the command line: what there is, whether it is whole, and the same as `pt` files.

    python -m megatron.quantscope.capture list DIR
    python -m megatron.quantscope.capture verify DIR [--run ID]
    python -m megatron.quantscope.capture export SOURCE DESTINATION [--run ID]

Exit code 0: done, and nothing wrong; 1: something is wrong, one line each says what; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.columns import aligned

if TYPE_CHECKING:
    from megatron.quantscope.capture.run_folder import RunFolder

PROGRAM = "python -m megatron.quantscope.capture"
DONE, FAILED, INTERRUPTED = 0, 1, 130
_COLUMNS = ("type", "run", "began", "mode", "format", "ranks", "iterations", "rows", "bytes", "end")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Look after tensor captures.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (function, summary, places) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        for place, meaning in places.items():
            command.add_argument(place, metavar=place.upper(), help=meaning)
        if name != "list":
            command.add_argument("--run", metavar="ID", help=_RUN_HELP[name])
        command.set_defaults(function=function)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code.
    """
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.function(options)
    except CaptureError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def run_verify(options: argparse.Namespace) -> int:
    """Check the capture `options.directory`, of the run `options.run` or of all, and say what is wrong with it."""
    from megatron.quantscope.capture.verify import verify

    result = verify(options.directory, options.run)
    if result.findings:
        print(aligned((finding.kind, f"{finding.file}: {finding.message}") for finding in result.findings))
    wrong = len(result.findings)
    print(
        f"{result.ok:,} rows and {result.bytes:,} bytes are as they were written, "
        f"{wrong or 'no'} finding{'' if wrong == 1 else 's'}"
    )
    return FAILED if result.findings else DONE


def _export(options: argparse.Namespace) -> int:
    from megatron.quantscope.capture.export import export

    written = export(options.source, options.destination, options.run)
    print(f"{written.rows:,} rows in {written.files:,} files of {written.bytes:,} bytes in {options.destination}")
    return DONE


def _list(options: argparse.Namespace) -> int:
    from megatron.quantscope.capture.reader import capture_folders
    from megatron.quantscope.capture.run_folder import run_folders

    root = Path(options.directory)
    try:
        lines = [_run_line(folder, run) for folder in capture_folders(root) for run in run_folders(folder)]
    except OSError as error:
        raise CaptureError(f"can not read {error.filename or root}: {error.strerror or error}") from error
    if not lines:
        raise CaptureError(f"no runs in {root}")
    print(aligned([_COLUMNS, *lines]))
    return DONE


def _run_line(folder: Path, run: RunFolder) -> tuple[str, ...]:
    info, manifests = run.info(), run.manifests()
    capture = info.get("capture") or {}
    ends = {end["kind"] for manifest in manifests for end in manifest.ends}
    open_ = any(not manifest.ends for manifest in manifests)
    files = {row["file"]: row["bytes"] for each in manifests for row in each.rows if row["store"] == "pt"}
    size = sum(files.values()) + sum(run.files.segments.values())
    return (
        str(info.get("quant_type") or folder.name),
        run.run_id,
        str(info.get("created") or "?").partition(".")[0],
        str(capture.get("mode") or "tensors"),
        str(capture.get("save_format") or "pt"),
        str(len(manifests)),
        str(len({iteration for manifest in manifests for iteration in manifest.commits})),
        f"{sum(len(manifest.rows) for manifest in manifests):,}",
        f"{size:,}",
        "not closed" if open_ else "stopped early" if "stopped" in ends else "closed",
    )


_CAPTURE = "a capture: a directory of type folders, or one type folder"
_RUN_HELP = {
    "verify": "check this run alone (default: all runs, and that there is nothing else)",
    "export": "write this run (default: the latest of each type that kept anything)",
}
_Command = tuple[Callable[[argparse.Namespace], int], str, dict[str, str]]
_COMMANDS: dict[str, _Command] = {
    "list": (_list, "list the runs of a capture", {"directory": _CAPTURE}),
    "verify": (run_verify, "name every damaged, missing or foreign file of a capture", {"directory": _CAPTURE}),
    "export": (
        _export,
        "write a capture as one file a tensor, as --tensor-save-format pt does",
        {"source": _CAPTURE, "destination": "the capture root to write to; other runs in it stay as they are"},
    ),
}


if __name__ == "__main__":
    sys.exit(main())
