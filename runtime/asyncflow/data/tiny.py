"""The tiny tasks that the project makes itself: ``tiny://reverse-digits``.

Invariant: prompt and answer are ASCII and short, so that a two-layer model on a CPU can learn them in a minute.
"""

from __future__ import annotations

from asyncflow.data.base import GeneratedSource, Prompt, Purpose
from asyncflow.errors import ManifestError

DIGITS = 5
NAMES = ("reverse-digits",)


def reverse_digits(index: int) -> Prompt:
    """Give "40718=", whose answer is "81704", for an index below ``10 ** DIGITS``."""
    digits = f"{index:0{DIGITS}d}"
    return Prompt(question=f"{digits}=", answer=digits[::-1], task="tiny://reverse-digits")


def open_tiny(name: str, *, seed: int, purpose: Purpose, size: int | None, where: str) -> GeneratedSource:
    """Open the tiny task ``name``. Raises ManifestError where there is none of that name."""
    if name not in NAMES:
        raise ManifestError(f"there is no tiny task {name!r}", where=where, hint=f"one of: {', '.join(NAMES)}")
    return GeneratedSource(
        reverse_digits, name=f"tiny://{name}", indices=10**DIGITS, seed=seed, purpose=purpose, size=size
    )
