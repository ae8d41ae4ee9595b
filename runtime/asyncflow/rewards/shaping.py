"""The reward ``length``: a penalty for long responses, as one component of several.

It is the soft overlong punishment of DAPO (Yu et al. 2025, equation 13): 0 up to ``target`` tokens, then linearly
falling to -1 over ``width`` tokens, and -1 for longer responses.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from asyncflow.errors import ManifestError
from asyncflow.plugins import read_options


class LengthOptions(msgspec.Struct, frozen=True):
    """Settings. target: tokens without a penalty; width: tokens over which the penalty grows to 1, 0 for a step."""

    target: Annotated[int, msgspec.Meta(ge=0)] = 0
    width: Annotated[int, msgspec.Meta(ge=0)] = 0


class LengthPenalty:
    """The penalty, from 0 to -1. Raises ManifestError if the settings are invalid."""

    def __init__(self, *, config: dict[str, Any]) -> None:
        options = read_options(config, LengthOptions, where="spec.reward.config")
        if options.target == options.width == 0:
            what, hint = "every response would have the reward -1", "Set target to the tokens without a penalty"
            raise ManifestError(what, where="spec.reward.config", hint=hint)
        self._target, self._width = options.target, options.width

    def __call__(self, *, length: int) -> float:
        """Return the penalty of a response of ``length`` tokens, including the end token."""
        beyond = max(0, length - self._target)
        return 0.0 - min(1.0, beyond / max(1, self._width))
