"""Random numbers that belong to a token, not to a time.

The uniform that decides response token ``position`` of a sample is a function of (seed, serial, sample, position) only:
output ``position`` of a SplitMix64 generator (Steele, Lea and Flood 2014) whose state is hashed from the first three.

Invariants: a sample has the same random numbers whichever instance generates it, at any time, in any slot, next to any
other samples, and any number of times. The same integers give the same doubles on every platform.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from asyncflow.identity import SampleKey

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1


def _finalize(word: int) -> int:
    """Return SplitMix64's finalizer applied to one 64-bit word."""
    word &= _MASK
    word = (word ^ word >> 30) * _FIRST & _MASK
    word = (word ^ word >> 27) * _SECOND & _MASK
    return word ^ word >> 31


def stream(*, seed: int, key: SampleKey) -> int:
    """Return the generator state (uint64) of sample ``key`` under ``seed``."""
    state = _finalize(seed + _GOLDEN)
    for part in key:
        state = _finalize(state * _FIRST + part + _GOLDEN)
    return state


def purpose_seed(seed: int, purpose: str) -> int:
    """Return the seed for ``purpose``: ``seed`` itself for ``train``. So different purposes may share keys."""
    return seed if purpose == "train" else _finalize(seed ^ zlib.crc32(purpose.encode()) << 32)


def words(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return output ``positions[i]`` (from 0) of the generator ``streams[i]``, as uint64; the shapes broadcast."""
    word = streams + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    word = (word ^ word >> np.uint64(30)) * np.uint64(_FIRST)
    word = (word ^ word >> np.uint64(27)) * np.uint64(_SECOND)
    mixed: NDArray[np.uint64] = word ^ word >> np.uint64(31)
    return mixed


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return doubles in [0, 1) with 53 random bits: outputs ``positions`` of ``streams``, whose shapes broadcast."""
    return (words(streams, positions) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def uniform(state: int, position: int) -> float:
    """Return ``uniforms`` of one generator at one position."""
    return (_finalize(state + (position + 1) * _GOLDEN) >> 11) * 2.0**-53
