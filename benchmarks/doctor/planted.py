"""Reward functions that cause faults."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any


def nothing(**_: Any) -> float:
    """Return 0 for every response."""
    return 0.0


def dice(**_: Any) -> float:
    """Return a random reward, so that equal responses get different rewards."""
    return random.random()


def by_prompt(*, prompt: str, **_: Any) -> float:
    """Return a reward that depends on the prompt alone."""
    return hashlib.sha256(prompt.encode()).digest()[0] / 512


def slow(**_: Any) -> float:
    """Return 0 after a tenth of a second."""
    time.sleep(0.1)
    return 0.0


def fails_often(*, response: str, prompt: str, **_: Any) -> float:
    """Raise for about every seventh response."""
    drawn = hashlib.sha256((prompt + response).encode()).digest()[0]
    if drawn < 37:
        raise ValueError(f"cannot judge {response!r}")
    return drawn / 256


def fails(**_: Any) -> float:
    """Raise for every response."""
    raise ValueError("no such server")
