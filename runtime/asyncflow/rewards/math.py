"""The reward ``math_verify``: 1 where math-verify finds the response equal to the answer, else 0.

math-verify limits its own time by SIGALRM, which works in a main thread only: a reward process calls it there.
"""

from __future__ import annotations

from typing import Any


def score(*, response: str, prompt: str, answer: Any, meta: dict[str, Any]) -> float:  # noqa: ARG001
    """Compare two expressions, LaTeX or plain; an answer without dollar signs is taken as LaTeX where it parses so."""
    from math_verify import parse, verify

    gold = parse(f"${answer}$") or parse(str(answer))
    return float(verify(gold, parse(response)))
