r"""The reward ``math_verify``: 1 if math-verify finds the response equal to the answer, otherwise 0.

math-verify parses text between dollar signs or in ``\boxed{}`` as mathematics, and any other text at most as a number.
Therefore the result of the extractor ``boxed`` is put into a box again.

math-verify limits its time by SIGALRM, which works only in the main thread; a reward process calls it there. It passes
plain arithmetic to ``sympy.parse_expr``, which calls ``eval``. Here ``expressions`` checks every such text first.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, parser, verify
from sympy.parsing import parse_expr

from asyncflow.rewards.expressions import algebra


class MathVerify:
    """Comparison of two expressions. extractor: name of the extractor of the answer from the response."""

    def __init__(self, *, extractor: str) -> None:
        self._boxed = extractor == "boxed"

    def __call__(self, *, response: str, answer: Any) -> float:
        """Compare two expressions, LaTeX or plain. The source's answer is first parsed as LaTeX, then as plain text.

        Raises ValueError if the source's answer cannot be parsed, since no response can be compared with it.
        """
        gold = [] if answer is None else parse(f"${answer}$") or parse(str(answer))
        if not gold:
            what = f"the source's answer is {answer!r}, which math-verify cannot parse"
            raise ValueError(f"{what}: correct it in the data, or remove the prompt")
        return float(verify(gold, parse(f"\\boxed{{{response}}}" if self._boxed else response)))


def _parse_checked(text: str, **options: Any) -> Any:
    algebra(text)
    return parse_expr(text, **options)


parser.parse_expr = _parse_checked
