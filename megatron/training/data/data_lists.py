"""Blends that stand in a file, because a command line would be too long for them.

    --data-args-path FILE             what --data-path takes, separated by blanks or lines
    --per-split-data-args-path FILE   JSON: {"train": ..., "valid": ..., "test": ...}, each a list of what
                                      --train-data-path etc. take, or a string of it; null or missing: none

They become the flags whose place they take, so that nothing else knows of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron.training.failure import UsageError

SPLITS = ("train", "valid", "test")


def apply_data_lists(args: argparse.Namespace) -> None:
    """Set `data_path`, or `train_data_path` and its like, from the files that the flags name.

    Raises:
        UsageError: when a file is none, or a flag whose place it takes is given too.
    """
    if args.data_args_path is not None:
        _require_absent(args, "--data-args-path", ("data_path",))
        args.data_path = _read(args.data_args_path, "--data-args-path").split()
        if not args.data_path:
            raise UsageError(f"--data-args-path: {args.data_args_path} names no data")
    if args.per_split_data_args_path is not None:
        flag, path = "--per-split-data-args-path", args.per_split_data_args_path
        _require_absent(args, flag, tuple(f"{split}_data_path" for split in SPLITS))
        for split, words in _per_split(_read(path, flag), f"{flag}: {path}").items():
            setattr(args, f"{split}_data_path", words)


def _require_absent(args: argparse.Namespace, flag: str, destinations: tuple[str, ...]) -> None:
    for destination in destinations:
        if getattr(args, destination):
            raise UsageError(f"{flag} stands in place of --{destination.replace('_', '-')}; give one of them")


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: {path} can not be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _per_split(text: str, where: str) -> dict[str, list[str] | None]:
    try:
        stored: Any = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    if not isinstance(stored, dict) or set(stored) - set(SPLITS):
        raise UsageError(f"{where} is not a JSON object with {', '.join(SPLITS)}")
    words: dict[str, list[str] | None] = {}
    for split in SPLITS:
        value = stored.get(split)
        if value is not None and not isinstance(value, str | list):
            raise UsageError(f"{where}: {split} is neither a list nor a string")
        listed = value.split() if isinstance(value, str) else [str(word) for word in value or ()]
        words[split] = listed or None
    return words
