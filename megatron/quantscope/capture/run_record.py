"""`run.json`: which run wrote the files beside it, with which configuration, versions and command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.config import CaptureConfig
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import place
from megatron.quantscope.capture.plain import to_json

RUN_FILE = "run.json"
RUN_SCHEMA = 1


def write_run_record(run_folder: Path, config: CaptureConfig, fields: Mapping[str, Any]) -> None:
    """Make `run_folder` and its `run.json`; the first rank to come writes it, the others find it there.

    Args:
        run_folder: `DIR/<quant_type>/runs/<run_id>`.
        config: The capture's own settings, kept under the key "capture".
        fields: What else is known of the run. Values that JSON has no word for are kept as text.

    Raises:
        CaptureError: when it can not be written; then a folder that was made for it is gone again.
    """
    record = {
        "schema": RUN_SCHEMA,
        "created": datetime.now().isoformat(sep=" ", timespec="microseconds"),
        **fields,
        "capture": asdict(config),
    }
    text = to_json(json.loads(json.dumps(record, default=str)))
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            place(run_folder / RUN_FILE, lambda temporary: _write_text(temporary, text))
    except OSError as error:
        with contextlib.suppress(OSError):
            run_folder.rmdir()
        raise CaptureError(f"can not write to {run_folder}: {error.strerror or error}") from error


def remove_run_record(run_folder: Path) -> None:
    """Take back the record of a run that kept nothing, and the folders that are empty then."""
    with contextlib.suppress(OSError):  # another rank's manifest is there: the run goes on
        if [path.name for path in run_folder.iterdir()] == [RUN_FILE]:
            (run_folder / RUN_FILE).unlink()
        for folder in (run_folder, run_folder.parent, run_folder.parent.parent):
            folder.rmdir()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
