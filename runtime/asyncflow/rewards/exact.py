"""The reward ``task``: 1 where the answer is exactly the source's, else 0."""

from __future__ import annotations

from typing import Any


def score(*, response: str, prompt: str, answer: Any, meta: dict[str, Any]) -> float:  # noqa: ARG001
    """Compare as text."""
    return float(response == str(answer).strip())
