"""Lookup and import of a task's function by its name ``module:function``.

Invariant: only ``load_function`` imports the module, and only the task's processes call it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from asyncflow.errors import ManifestError

SHOWN: Final = -8
"""Limit of a traceback: its last eight frames are kept."""


def check_function(function: str, *, workdir: Path, where: str) -> None:
    """Raise ManifestError if the module of a function cannot be found, without importing it."""
    package = function.partition(":")[0].partition(".")[0]
    if PathFinder.find_spec(package, [str(workdir), *sys.path]) is None:
        what = f"no module {package!r} in {workdir} or among the installed packages"
        raise ManifestError(what, where=where, hint="Put the file next to the manifest, or install its package")


def load_function(function: str, *, workdir: Path) -> Callable[..., Any]:
    """Import the function. Raises ManifestError if there is none that can be called with rows and config."""
    if str(workdir) not in sys.path:
        sys.path.insert(0, str(workdir))
    module, _, attribute = function.partition(":")
    candidate: Any = getattr(importlib.import_module(module), attribute, None)
    if not callable(candidate):
        raise ManifestError(
            f"module {module!r} has no function {attribute!r}",
            where="spec.tasks",
            hint="Define it, or correct its name",
        )
    try:
        inspect.signature(candidate).bind([], {})
    except TypeError as error:
        hint = "Define it as def function(rows, config)"
        raise ManifestError(f"{function!r} cannot be called: {error}", where="spec.tasks", hint=hint) from error
    loaded: Callable[..., Any] = candidate
    return loaded
