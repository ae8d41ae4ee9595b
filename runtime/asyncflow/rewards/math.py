"""The reward ``math_verify``: 1 where math-verify finds the response equal to the answer, else 0.

math-verify takes for mathematics what is between dollar signs or in a box, and of anything else at most a number: what
the extractor ``boxed`` took out of its box is put into one again.

math-verify limits its own time by SIGALRM, which works in a main thread only: a reward process calls it there. What it
takes for plain arithmetic it gives to ``sympy.parse_expr``, which is ``eval``: only what ``expressions`` has read
gets there.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, parser, verify
from sympy.parsing import parse_expr

from asyncflow.rewards.expressions import algebra


class MathVerify:
    """The comparison of two expressions. extractor: name of that which finds the response."""

    def __init__(self, *, extractor: str) -> None:
        self._boxed = extractor == "boxed"

    def __call__(self, *, response: str, answer: Any) -> float:
        """Compare expressions, LaTeX or plain; an answer without dollar signs is taken as LaTeX where it parses so.

        Raises ValueError for an answer that cannot be read, with which no response could be compared.
        """
        gold = [] if answer is None else parse(f"${answer}$") or parse(str(answer))
        if not gold:
            what = f"the source's answer is {answer!r}, which math-verify cannot read"
            raise ValueError(f"{what}: mend it in the data, or leave the prompt out")
        return float(verify(gold, parse(f"\\boxed{{{response}}}" if self._boxed else response)))


def _parse_checked(text: str, **options: Any) -> Any:
    algebra(text)
    return parse_expr(text, **options)


parser.parse_expr = _parse_checked
