"""A user's functions (rewards, environments, tasks), which a manifest names ``module:function``.

Invariant: finding a function runs none of the user's code; only the process that will call it imports it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from asyncflow.errors import ManifestError


def find_function(function: str, *, workdir: Path, where: str) -> None:
    """Raise ManifestError if the module of a user's function is neither in ``workdir`` nor installed.

    Nothing is imported. where: the field of the manifest that names the function.
    """
    package = function.partition(":")[0].partition(".")[0]
    if PathFinder.find_spec(package, [str(workdir), *sys.path]) is None:
        what = f"there is no module {package!r} in {workdir} or among the installed packages"
        raise ManifestError(what, where=where, hint="Put the file next to the manifest, or install the package")


def import_function(function: str, *, workdir: Path) -> Any:
    """Import the module of a user's function, searched first in ``workdir``, and return the function or class.

    Raises ManifestError if the module has no such function; the import may raise any exception.
    """
    if str(workdir) not in sys.path:
        sys.path.insert(0, str(workdir))
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ManifestError(f"the module {module!r} has no function {name!r}")
    return found
