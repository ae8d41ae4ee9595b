"""A task's function by its name ``module:function``: looked for, and imported.

Invariant: nothing is imported before ``load_function``, which is called in the task's processes only.
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
"""Frames of a traceback that are kept: the last ones."""


def check_function(function: str, *, workdir: Path, where: str) -> None:
    """Refuse a function whose module is not to be found, without importing it. Raises ManifestError."""
    package = function.partition(":")[0].partition(".")[0]
    if PathFinder.find_spec(package, [str(workdir), *sys.path]) is None:
        what = f"no module {package!r} in {workdir} or among what is installed"
        raise ManifestError(what, where=where, hint="Put the file beside the manifest, or install its package")


def load_function(function: str, *, workdir: Path) -> Callable[..., Any]:
    """Import the function. Raises ManifestError where there is none that can be called with rows and config."""
    if str(workdir) not in sys.path:
        sys.path.insert(0, str(workdir))
    module, _, attribute = function.partition(":")
    found: Any = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise ManifestError(f"module {module!r} has no function {attribute!r}", where="spec.tasks")
    try:
        inspect.signature(found).bind([], {})
    except TypeError as error:
        hint = "Define it as `def function(rows, config)`"
        raise ManifestError(f"{function!r} cannot be called: {error}", where="spec.tasks", hint=hint) from error
    called: Callable[..., Any] = found
    return called
