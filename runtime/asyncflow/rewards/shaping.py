"""The reward ``length``: a penalty for long responses, as one component of several.

It is the soft overlong punishment of DAPO (Yu et al. 2025, equation 13): 0 up to ``target`` tokens, from there it falls
linearly to -1 over ``width`` tokens, and it is -1 beyond.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from asyncflow.plugins import read_options


class LengthOptions(msgspec.Struct, frozen=True):
    """Settings. target: tokens without a penalty; width: tokens over which it grows to 1, 0 is at once."""

    target: Annotated[int, msgspec.Meta(ge=0)] = 0
    width: Annotated[int, msgspec.Meta(ge=0)] = 0


class LengthPenalty:
    """The penalty, from 0 down to -1. Raises ManifestError for settings that have no meaning."""

    def __init__(self, *, config: dict[str, Any]) -> None:
        options = read_options(config, LengthOptions, where="reward.config")
        self._target, self._width = options.target, options.width

    def __call__(self, *, length: int) -> float:
        """Return the penalty of a response of ``length`` tokens, that which ends it included."""
        beyond = max(0, length - self._target)
        return -min(1.0, beyond / max(1, self._width))
