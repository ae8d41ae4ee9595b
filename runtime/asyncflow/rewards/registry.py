"""Which function a manifest means by ``reward.function``: a name of the project, or the user's ``module:function``.

A user's function is called as ``fn(*, response: str, prompt: str, answer, meta) -> float``: the response after the
extractor, the prompt's question, and the answer and meta of the data source (JSON values). A finite number is a reward;
an evaluation counts a sample as right where it is at least 1.

Invariant: nothing is imported before ``load``, which only a reward process calls.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Protocol

from asyncflow.errors import ManifestError
from asyncflow.rewards.extract import EXTRACTORS


class RewardFunction(Protocol):
    """What scores a response."""

    def __call__(self, *, response: str, prompt: str, answer: Any, meta: dict[str, Any]) -> float:
        """Give the reward, a finite number; may raise anything and take for ever."""


BUILT_IN = {
    "task": "asyncflow.rewards.exact:score",
    "gym": "asyncflow.rewards.gym:score",
    "math_verify": "asyncflow.rewards.math:score",
}
"""The functions of the project, by name."""

_USER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check(function: str, extractor: str, *, workdir: Path) -> None:
    """Refuse what cannot be loaded, as far as that can be told without running anybody's code.

    workdir: the job's folder, where a user's module is looked for first. Raises ManifestError.
    """
    if extractor not in EXTRACTORS:
        raise ManifestError(
            f"there is no extractor {extractor!r}", where="reward.extractor", hint=f"one of: {', '.join(EXTRACTORS)}"
        )
    if function in BUILT_IN:
        return
    if not _USER.fullmatch(function):
        raise ManifestError(
            f"{function!r} is no reward function",
            where="reward.function",
            hint=f"{', '.join(BUILT_IN)}, or module:function of a module in the job's folder",
        )
    package = function.partition(":")[0].partition(".")[0]
    if PathFinder.find_spec(package, [str(workdir), *sys.path]) is None:
        raise ManifestError(
            f"no module {package!r} in {workdir} or among what is installed",
            where="reward.function",
            hint="put the file beside the manifest",
        )


def load(function: str, *, workdir: Path) -> RewardFunction:
    """Import the function; an import may raise anything.

    Raises ManifestError where the module has no such function, TypeError for one that cannot be called as it will be.
    """
    if str(workdir) not in sys.path:
        sys.path.insert(0, str(workdir))
    module, _, attribute = BUILT_IN.get(function, function).partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise ManifestError(f"module {module!r} has no function {attribute!r}", where="reward.function")
    _check_call(found)
    scorer: RewardFunction = found
    return scorer


def _check_call(function: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called as a ``RewardFunction``. Raises TypeError."""
    if inspect.iscoroutinefunction(function):
        raise TypeError("it is a coroutine function (async def), and a plain function is called")
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled code may have none
        return
    try:
        signature.bind(response="", prompt="", answer=None, meta={})
    except TypeError as error:
        hint = "it is called with the keywords response, prompt, answer and meta"
        raise TypeError(f"it takes {signature}, and {hint}: {error}") from error
