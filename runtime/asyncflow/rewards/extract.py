"""Answer extractors: which part of a response is the answer, by name.

Invariant: an extractor is a pure function of the response, the same before and after training; "" means: no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_BOXED = "\\boxed{"


def text(response: str) -> str:
    """Return the whole response without the white space around it."""
    return response.strip()


def last_number(response: str) -> str:
    """Return the last decimal number, without thousands separators and plus: "so 1,000 - 1 = +999." gives "999"."""
    numbers = _NUMBER.findall(response.replace("\N{MINUS SIGN}", "-"))
    return numbers[-1].replace(",", "").removeprefix("+") if numbers else ""


def boxed(response: str) -> str:
    r"""Return the content of the last ``\boxed{...}`` whose braces close."""
    start = response.rfind(_BOXED)
    if start < 0:
        return ""
    depth = 1
    begin = start + len(_BOXED)
    for place in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if depth == 0:
            return response[begin:place].strip()
    return ""


EXTRACTORS: dict[str, Callable[[str], str]] = {"text": text, "last_number": last_number, "boxed": boxed}
