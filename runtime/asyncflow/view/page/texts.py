"""Samples of a step as the page shows them: with their texts, or with their figures alone.

Invariant: without texts nothing is passed on that a data source, a model or a reward function wrote: only numbers, how
a response ended, and why there is no reward in a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from asyncflow.driver.sample_files import Purpose, read_step

_WRITTEN: Final = ("prompt", "response", "answer", "details")


def samples(folder: Path, *, purpose: Purpose, step: int, texts: bool) -> list[dict[str, Any]]:
    """Return what is kept of a step or an evaluation, in the order of prompts. Raises AsyncFlowError."""
    left_out = () if texts else _WRITTEN
    return [
        {name: value for name, value in msgspec.to_builtins(sample).items() if name not in left_out}
        for sample in read_step(folder, purpose=purpose, step=step)
    ]
