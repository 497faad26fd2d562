"""Lay this tree's `megatron.core` over the installed one, file by file.

What: `megatron` is a PEP 420 namespace (no `__init__.py`, here as upstream). This tree's `megatron/core` is a regular
package that comes first on `sys.path`, so it wins, and then takes upstream's directory as the second entry of its
`__path__`: a module that stands here is ours, every other one is upstream's.

How: a package of ours calls `package(globals())`, a module of ours calls `module(globals())`. Both execute upstream's
file of the same name in the namespace of ours, so that every upstream name exists once, with upstream's `__module__`;
what follows in the file is the delta. Subclassing in a second module instead would leave two classes of one name, and
pickles that load only here.

Why exactly one upstream: `extend_path` appends every portion on `sys.path`, a Megatron-LM checkout and the installed
package alike. A module missing from the first would silently come from another version, so all but the first are cut.

Trade-off: `inspect.getsource` of a class executed this way finds no source (functions are fine), and the overlay works
from a checkout only: installed behind site-packages it would lose, and a wheel would overwrite megatron-core's files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pkgutil import extend_path
from typing import Any

Namespace = dict[str, Any]


def package(namespace: Namespace, *, check: Callable[[str], None] | None = None) -> None:
    """Put upstream's directory behind ours on `__path__` and run upstream's `__init__.py` in `namespace`.

    Args:
        namespace: `globals()` of our package's `__init__.py`.
        check: Is shown upstream's directory before anything in it runs, and raises ImportError to refuse it.

    Raises:
        ImportError: when no other portion of the package is on `sys.path`, or it is refused.
    """
    ours = os.path.realpath(namespace["__path__"][0])
    portions = extend_path([ours], namespace["__name__"])
    upstream = next((path for path in portions if os.path.realpath(path) != ours), None)
    if upstream is None:
        raise ImportError(
            f"no upstream {namespace['__name__']} beside {ours}: install megatron-core (script/setup_env.sh does), "
            "or put a Megatron-LM checkout on PYTHONPATH"
        )
    if check is not None:
        check(upstream)
    namespace["__path__"][:] = [ours, upstream]
    _run(namespace, os.path.join(upstream, "__init__.py"))


def module(namespace: Namespace) -> None:
    """Run upstream's module of the same name in `namespace`; what follows in our file is the delta.

    Args:
        namespace: `globals()` of our module, whose package called `package` before.
    """
    parent = sys.modules[namespace["__name__"].rpartition(".")[0]]
    _run(namespace, os.path.join(parent.__path__[1], os.path.basename(namespace["__file__"])))


def _run(namespace: Namespace, path: str) -> None:
    namespace["__upstream_file__"] = path
    # get_code() reads and writes __pycache__ as an import does, and keeps upstream's path in tracebacks.
    code = SourceFileLoader(namespace["__name__"], path).get_code(namespace["__name__"])
    exec(code, namespace)
