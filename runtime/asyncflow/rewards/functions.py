"""Reward functions by their name in the manifest: one of the project's, or the user's ``module:function``.

How a function is called is said in ``rewards.calling``. An evaluation counts a sample as right where its reward is at
least 1.

Invariants: nothing is imported before ``load``, which only a reward process calls; an extractor is a pure function of
the response, the same before and after training, and "" means: no answer.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from asyncflow.errors import ManifestError
from asyncflow.rewards.calling import Extractor, RewardFunction

BUILT_IN = {
    "task": "asyncflow.rewards.functions:exact",
    "gym": "asyncflow.rewards.gym:score",
    "math_verify": "asyncflow.rewards.math:MathVerify",
    "length": "asyncflow.rewards.shaping:LengthPenalty",
    "http": "asyncflow.rewards.endpoint:Endpoint",
    "reward_model": "asyncflow.rewards.classifier:RewardModel",
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
    check_module(function, where="reward.function", known=BUILT_IN, workdir=workdir)


def check_module(function: str, *, where: str, known: Iterable[str], workdir: Path) -> None:
    """Refuse what is neither ``known`` nor of a module that can be found. Raises ManifestError."""
    if function in known:
        return
    if not _USER.fullmatch(function):
        raise ManifestError(
            f"{function!r} is no {where.replace('.', ' ')}",
            where=where,
            hint=f"{', '.join(known)}, or module:function of a module in the job's folder",
        )
    package = function.partition(":")[0].partition(".")[0]
    if PathFinder.find_spec(package, [str(workdir), *sys.path]) is None:
        raise ManifestError(
            f"no module {package!r} in {workdir} or among what is installed",
            where=where,
            hint="put the file beside the manifest",
        )


def load(
    function: str, *, workdir: Path, config: dict[str, Any] | None = None, place: Mapping[str, Any] | None = None
) -> RewardFunction:
    """Import the function; config: its settings; place: see ``RewardFunction.of``.

    Raises ManifestError where there is no such function, or it cannot be called as it will be; an import may raise
    anything.
    """
    if str(workdir) not in sys.path:
        sys.path.insert(0, str(workdir))
    module, _, attribute = BUILT_IN.get(function, function).partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise ManifestError(f"module {module!r} has no function {attribute!r}", where="reward.function")
    return RewardFunction.of(found, name=function, config=config, place=place or {})


def exact(*, response: str, answer: Any) -> float:
    """Return 1 where the response is exactly the source's answer, as text, else 0.

    Raises ValueError where the source has none: a response without an answer would be equal to it.
    """
    right = "" if answer is None else str(answer).strip()
    if not right:
        what = f"the source's answer is {answer!r}: name its field in config.answer, or leave the prompt out"
        raise ValueError(what)
    return float(response == right)


_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w).])\.\d+)")
_BOXED = "\\boxed{"


def text(response: str) -> str:
    """Return the whole response without the white space around it."""
    return response.strip()


def last_number(response: str) -> str:
    """Return the last decimal number, without thousands separators and plus: "so 1,000 - 1 = +999." gives "999".

    A number that begins with its point is given a 0 before it.
    """
    *_, last = "", *_NUMBER.findall(response.replace("\N{MINUS SIGN}", "-"))
    return re.sub(r"^-?(?=\.)", r"\g<0>0", last.replace(",", "").removeprefix("+"))


def boxed(response: str) -> str:
    r"""Return the content of the last ``\boxed{...}`` whose braces close."""
    opened: list[int] = []
    last, found = 0, ""
    for place, letter in enumerate(response, 1):
        if letter == "{":
            opened.append(place)
        elif letter == "}" and opened and (begin := opened.pop()) > last and response.endswith(_BOXED, 0, begin):
            last, found = begin, response[begin : place - 1].strip()
    return found


EXTRACTORS: dict[str, Extractor] = {"text": text, "last_number": last_number, "boxed": boxed}
