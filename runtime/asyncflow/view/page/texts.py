"""Samples of a step for the page: with their texts, or only their figures.

Invariant: without texts, an answer contains no text from a data source, a model or a reward function: only numbers, the
finish reason of a response, and the kind of failure of a reward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from asyncflow.driver.sample_files import Purpose, read_step

_TEXT_FIELDS: Final = ("prompt", "response", "answer", "details")


def samples(folder: Path, *, purpose: Purpose, step: int, texts: bool) -> list[dict[str, Any]]:
    """Return the kept samples of a step or an evaluation, in the order of prompts. Raises AsyncFlowError."""
    left_out = () if texts else _TEXT_FIELDS
    return [
        {name: value for name, value in msgspec.to_builtins(sample).items() if name not in left_out}
        for sample in read_step(folder, purpose=purpose, step=step)
    ]
