#!/usr/bin/env python3
"""Run a stock Megatron-LM training script, unchanged, with this tree's quantisation and capture.

    torchrun --nproc_per_node 8 script/instrument.py /path/to/Megatron-LM/pretrain_gpt.py FLAGS

The script's flags are its own, plus those of quantisation and capture (--quant-type, --save-tensors, ...).

How: both trees have a `megatron/core` and a `megatron/training`. Here `megatron.training` has to be theirs and
`megatron.core` ours (which is theirs with ours laid over it), and no order of `sys.path` gives that. So this tree stays
off `sys.path`; a finder in front answers for three packages of ours and for nothing else, and all that is beside the
script comes first, as if it had been started by its path. `script.stock` then wraps a few functions of theirs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Package -> the folder of this tree that it is in.
OURS = {"script": ROOT, "megatron.core": ROOT / "megatron", "megatron.quantscope": ROOT / "megatron"}
USAGE = "usage: instrument.py /path/to/Megatron-LM/pretrain_gpt.py FLAGS"
DONE, WRONG_USAGE = 0, 2


class _Ours(importlib.abc.MetaPathFinder):
    """Finds the packages of `OURS` in this tree, whatever `sys.path` says; what is in them is found through them."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        folder = OURS.get(fullname)
        return importlib.machinery.PathFinder.find_spec(fullname, [str(folder)]) if folder else None


def main() -> int:
    """Run the script that the first argument names; returns the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        lines = (__doc__ or "").splitlines()
        print(USAGE, *lines[1:5], sep="\n", file=sys.stdout if len(sys.argv) > 1 else sys.stderr)
        return DONE if len(sys.argv) > 1 else WRONG_USAGE
    script = Path(sys.argv[1])
    if not script.is_file():
        print(f"instrument.py: error: no script {script}; {USAGE}", file=sys.stderr)
        return WRONG_USAGE
    sys.argv[:] = sys.argv[1:]
    give_way_to(script)
    return int(importlib.import_module("script.stock.program").run(script))


def give_way_to(script: Path) -> None:
    """Take this tree off `sys.path` and put the script's folder first; what is ours is found by `_Ours`."""
    ours = {ROOT, ROOT / "script"}
    others = [entry for entry in sys.path if Path(entry).resolve() not in ours]
    sys.path[:] = [str(script.resolve().parent), *others]
    sys.meta_path.insert(0, _Ours())


if __name__ == "__main__":
    sys.exit(main())
