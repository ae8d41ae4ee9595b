"""The calculator environment: answers a turn that calls it with a value; a turn without a call ends the episode.

Invariant: no text of a turn is run as code. An expression of numbers, ``+ - * /`` and parentheses has an exact value,
computed within fixed bounds. Any other text has the value ``error``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from asyncflow.rewards.expressions import arithmetic

ERROR = "error"
_VALUE = "{value}"
_MOST_DIGITS = 40


class Options(msgspec.Struct, frozen=True):
    """Settings.

    name: name of the function; reply: text around ``{value}``. For a chat model it is the part of its chat template
    that wraps a tool's answer, up to the start of the model's next turn.
    """

    name: str = "calc"
    reply: str = f"\n{_VALUE}\n"

    def __post_init__(self) -> None:
        if _VALUE not in self.reply:
            raise ValueError(f"reply does not contain {_VALUE}, in whose place the model reads the answer")


def answer(
    *, transcript: Sequence[Mapping[str, str]], prompt: str, answer: Any, meta: Mapping[str, Any], config: Any
) -> str | None:
    """Return the value of the last call in the last turn, or None if the turn contains no call. config: ``Options``."""
    del prompt, answer, meta
    options = msgspec.convert(config or {}, Options)
    expression = last_call(transcript[-1]["content"], name=options.name)
    return None if expression is None else options.reply.replace(_VALUE, value_of(expression))


def last_call(text: str, *, name: str) -> str | None:
    """Return the text inside the parentheses of the last ``name(...)`` in ``text``, or None if there is no call."""
    starts = {call.end() for call in re.finditer(rf"(?<!\w){re.escape(name)}\(", text)}
    opened: list[int] = []
    last, found = -1, None
    for position, letter in enumerate(text):
        if letter == "(":
            opened.append(position + 1)
        elif letter == ")" and opened and (start := opened.pop()) in starts and start > last:
            last, found = start, text[start:position]
    return found


def value_of(expression: str) -> str:
    """Return the value as decimal digits: exact for whole numbers, otherwise rounded to 10 digits."""
    try:
        value: Fraction = arithmetic(expression)
        if value.denominator == 1:
            digits = str(value.numerator)
            return digits if len(digits) <= _MOST_DIGITS else ERROR
        return f"{float(value):.10g}"
    except (ValueError, ArithmeticError):
        return ERROR
