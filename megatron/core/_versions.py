"""Which megatron-core this tree is laid over: the supported range, and the version of the one that was found.

The overlay replaces methods by name, so a version that has other names would run and be wrong, or fail somewhere deep.
It is therefore looked up before a line of upstream runs, in the text of its `package_info.py`: pip's record would name
the installed package where a Megatron-LM checkout wins, and running the file asks git.

Standard library only: this is imported before anything of upstream is.
"""

from __future__ import annotations

import os
import re

OLDEST, FIRST_UNSUPPORTED = (0, 14), (0, 20)

_FIELD = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?([\w.]*)['\"]?\s*(?:#.*)?$", re.MULTILINE)


def require_supported(directory: str) -> None:
    """See that this tree can be laid over the `megatron/core` in `directory`.

    Raises:
        ImportError: when it is of another version than those supported, or says none; one line.
    """
    fields = _fields(directory)
    if fields is None:
        raise ImportError(f"no version in {os.path.join(directory, 'package_info.py')}: {supported()}")
    if not OLDEST <= (int(fields["MAJOR"]), int(fields["MINOR"])) < FIRST_UNSUPPORTED:
        version = ".".join(fields[name] for name in ("MAJOR", "MINOR", "PATCH")) + fields.get("PRE_RELEASE", "")
        raise ImportError(f"megatron-core {version} is not supported: {supported()}; it comes from {directory}")


def supported() -> str:
    """The range, as messages say it."""
    oldest, end = (".".join(map(str, version)) for version in (OLDEST, FIRST_UNSUPPORTED))
    return f"this tree needs >= {oldest}, < {end}"


def _fields(directory: str) -> dict[str, str] | None:
    """What `package_info.py` assigns; None when it is not there, or lacks a number."""
    try:
        with open(os.path.join(directory, "package_info.py"), encoding="utf-8") as file:
            fields = dict(_FIELD.findall(file.read()))
    except OSError:
        return None
    return fields if all(fields.get(name, "").isdigit() for name in ("MAJOR", "MINOR", "PATCH")) else None
