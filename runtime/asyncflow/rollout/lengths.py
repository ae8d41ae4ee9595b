"""Lengths of simulated responses: keyed by the sample, like real ones, so that every run draws the same lengths.

Invariant: the length of a sample is a function of the distribution, the seed and the sample's key. It does not matter
when it is drawn, or whether the simulated engine or the simulator draws it.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Final

import msgspec

from asyncflow.identity import SampleKey
from asyncflow.rollout.sampling import stream, uniform

_OWN: Final = (2**40, 2**40 + 1)
"""Positions, beyond any token's, whose uniforms decide the length; shifted for later turns of an episode."""
_COMMON: Final = (2**40 + 2, 2**40 + 3)
"""The same for the first sample of a prompt: decides the common part of the lengths of all its samples."""
_TURN_POSITIONS: Final = 4
"""Number of positions that one turn uses for its length."""
_STANDARD: Final = NormalDist()


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of response lengths, in tokens.

    tokens: the median, or the constant length if sigma is 0 (0: the maximum allowed).
    sigma: standard deviation of the log of the length, which is normal.
    rho: correlation of these normals within a group.
    quantiles: of an empirical distribution that replaces tokens and sigma, equally spaced from the minimum to the
    maximum; () for none.
    """

    tokens: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    sigma: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    rho: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    quantiles: tuple[float, ...] = ()

    def of(self, key: SampleKey, *, seed: int, most: int, turn: int = 0) -> int:
        """Return the length of a sample, from 1 to ``most``. turn: number of tokens before its last turn."""
        normal = self._normal(key, seed, turn) if self.sigma or self.quantiles else 0.0
        return min(most, turn + max(1, round(self._length(normal, most))))

    def _length(self, normal: float, most: int) -> float:
        if not self.quantiles:
            return (self.tokens or most) * math.exp(self.sigma * normal)
        position = _STANDARD.cdf(normal) * (len(self.quantiles) - 1)
        low = min(int(position), len(self.quantiles) - 2) if len(self.quantiles) > 1 else 0
        high = min(low + 1, len(self.quantiles) - 1)
        return self.quantiles[low] + (position - low) * (self.quantiles[high] - self.quantiles[low])

    def _normal(self, key: SampleKey, seed: int, turn: int) -> float:
        normal = _normal(seed, key, _OWN, turn=turn)
        if self.rho:
            common = _normal(seed, SampleKey(key.serial, 0), _COMMON, turn=turn)
            normal = math.sqrt(self.rho) * common + math.sqrt(1 - self.rho) * normal
        return normal


def _normal(seed: int, key: SampleKey, positions: tuple[int, int], *, turn: int) -> float:
    """Return a standard normal, by Box and Muller, from the two uniforms of ``key`` at ``positions``.

    turn: start of the turn whose length it decides; each turn uses its own uniforms.
    """
    state = stream(seed=seed, key=key)
    first, second = (uniform(state, position + _TURN_POSITIONS * turn) for position in positions)
    return math.sqrt(-2 * math.log(1 - first)) * math.cos(2 * math.pi * second)
