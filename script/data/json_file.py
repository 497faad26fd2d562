"""A JSON object out of a small file that someone else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from script.data.command_line import InputError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return what a file holds.

    Raises:
        InputError: it is not there, or holds something else than one JSON object.
    """
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no JSON object ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: no JSON object, but {type(content).__name__}")
    return content
