"""The calculator: a turn that calls it is answered with a value, and one that does not ends the episode.

Invariant: nothing of a turn is run as code: an expression of numbers, ``+ - * /`` and parentheses has an exact value,
worked out within fixed bounds, and anything else has the value ``error``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from asyncflow.rewards.expressions import arithmetic

NAME = "calc"
REPLY = "\n{value}\n"
ERROR = "error"
_MOST_DIGITS = 40


def answer(
    *, transcript: Sequence[Mapping[str, str]], prompt: str, answer: Any, meta: Mapping[str, Any], config: Any
) -> str | None:
    """Return the value of the last call in the last turn; None where it has none.

    config: ``name`` of the function (``calc``) and the ``reply``, the text around ``{value}``: for a chat model, what
    its template puts around a tool's answer, up to where the model speaks again.
    """
    del prompt, answer, meta
    settings = config or {}
    expression = last_call(transcript[-1]["content"], name=settings.get("name", NAME))
    if expression is None:
        return None
    reply: str = settings.get("reply", REPLY)
    return reply.replace("{value}", value_of(expression))


def last_call(text: str, *, name: str) -> str | None:
    """Return what stands in the parentheses of the last ``name(...)`` in ``text``, None where there is none."""
    starts = [found.end() for found in re.finditer(rf"(?<!\w){re.escape(name)}\(", text)]
    for start in reversed(starts):
        depth = 1
        for place in range(start, len(text)):
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return None


def value_of(expression: str) -> str:
    """Return the value as decimal digits: exact for whole numbers, else to 10 digits."""
    try:
        value: Fraction = arithmetic(expression)
        if value.denominator == 1:
            digits = str(value.numerator)
            return digits if len(digits) <= _MOST_DIGITS else ERROR
        return f"{float(value):.10g}"
    except (ValueError, ArithmeticError):
        return ERROR
