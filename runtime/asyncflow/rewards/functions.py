"""Reward functions by their name in the manifest: the built-in functions, and the user's ``module:function``.

``rewards.calling`` documents the calls of a function.

Invariants: no reward function is imported before ``load``, which only a reward process calls. An extractor is a pure
function of the response; it returns "" if there is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncflow.errors import ManifestError
from asyncflow.functions import find_function, import_function
from asyncflow.rewards.calling import Extractor, RewardFunction

BUILT_IN = {
    "task": "asyncflow.rewards.functions:exact",
    "gym": "asyncflow.rewards.gym:score",
    "math_verify": "asyncflow.rewards.math:MathVerify",
    "length": "asyncflow.rewards.shaping:LengthPenalty",
    "http": "asyncflow.rewards.endpoint:Endpoint",
    "reward_model": "asyncflow.rewards.classifier:RewardModel",
}
"""The built-in functions, by name."""

_USER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check(function: str, extractor: str, *, workdir: Path) -> None:
    """Raise ManifestError if the function or the extractor cannot be found, without running the user's code.

    workdir: the job's folder, which is searched first for a user's module.
    """
    if extractor not in EXTRACTORS:
        hint = f"Use one of: {', '.join(EXTRACTORS)}"
        raise ManifestError(f"there is no extractor {extractor!r}", where="spec.reward.extractor", hint=hint)
    check_module(function, where="spec.reward.function", known=BUILT_IN, workdir=workdir)


def check_module(function: str, *, where: str, known: Iterable[str], workdir: Path) -> None:
    """Raise ManifestError if a function is neither ``known`` nor in a module that can be found."""
    if function in known:
        return
    if not _USER.fullmatch(function):
        raise ManifestError(
            f"{function!r} is neither a built-in function nor module:function",
            where=where,
            hint=f"Use {', '.join(known)}, or module:function of a module in the job's folder",
        )
    find_function(function, workdir=workdir, where=where)


def load(
    function: str, *, workdir: Path, config: dict[str, Any] | None = None, place: Mapping[str, Any] | None = None
) -> RewardFunction:
    """Import a reward function. config: its settings; place: see ``RewardFunction.of``.

    Raises ManifestError if there is no such function or its parameters are not supported. An import may raise any
    exception.
    """
    found = import_function(BUILT_IN.get(function, function), workdir=workdir)
    return RewardFunction.of(found, name=function, config=config, place=place or {})


def exact(*, response: str, answer: Any) -> float:
    """Return 1 if the response equals the source's answer as text, otherwise 0.

    Raises ValueError if the source has no answer, since a response without an answer would equal it.
    """
    right = "" if answer is None else str(answer).strip()
    if not right:
        what = f"the source's answer is {answer!r}: set config.answer to its field, or remove the prompt from the data"
        raise ValueError(what)
    return float(response == right)


_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w).])\.\d+)")
_BOXED = "\\boxed{"


def text(response: str) -> str:
    """Return the whole response without surrounding whitespace."""
    return response.strip()


def last_number(response: str) -> str:
    """Return the last decimal number, without thousands separators and plus sign: "1,000 - 1 = +999." -> "999".

    A number that begins with the decimal point gets a leading 0.
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
