"""Statistics of a step's samples: how many, how long, how old, and which.

Invariant: all entries are whole numbers that add up (or have a maximum) over slots and ranks, so the result does not
depend on how D_step was cut; two sets of samples have the same digest only if they are the same set, as far as 64 bits
can tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import starmap

import numpy as np
from numpy.typing import NDArray

from asyncflow.identity import Version
from asyncflow.train.batch import MicroBatch

_UNITS = 1 << 149
_DIGIT_BITS = 40
_DIGITS = 8
"""Digits of a sum of rewards: 320 bits hold 2^40 of the largest float32."""
_DIGIT = (1 << _DIGIT_BITS) - 1
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(kw_only=True)
class Tally:
    """Counts of one step. Lags are in steps, (step - 1) - v; ``staleness_start_sum`` is over samples that have tokens.

    The digest is a sum of 64-bit hashes of the keys, modulo 2^64, held as int64. ``rewards`` is the exact sum of the
    rewards, which are float32, in units of 2^-149: every float32 is a whole number of them.
    """

    samples: int = 0
    spoken: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    staleness_start_sum: int = 0
    staleness_token_sum: int = 0
    digest: int = 0
    rewards: int = 0
    staleness_start_max: int = 0
    staleness_end_max: int = 0

    def add(self, batch: MicroBatch, *, step: int) -> None:
        """Count the samples of ``batch``, which are part of D_step."""
        self.samples += len(batch)
        self.prompt_tokens += len(batch.prompts.values)
        self.response_tokens += len(batch.responses.values)
        digest = np.array([self.digest], dtype=np.int64).view(np.uint64)
        self.digest = int(np.append(_hashes(batch), digest).sum(dtype=np.uint64).view(np.int64))
        if batch.rewards is not None:
            ratios = map(float.as_integer_ratio, batch.rewards.tolist())
            self.rewards += sum(starmap(lambda over, under: over * (_UNITS // under), ratios))
        starts = batch.versions.offsets[:-1][batch.response_lengths() > 0]
        if not len(starts):
            return
        lags = np.array([step - 1 - Version.unpack(int(packed)).step for packed in batch.versions.values])
        oldest, newest = np.maximum.reduceat(lags, starts), np.minimum.reduceat(lags, starts)
        self.spoken += len(starts)
        self.staleness_start_sum += int(oldest.sum())
        self.staleness_token_sum += int(lags.sum())
        self.staleness_start_max = max(self.staleness_start_max, int(oldest.max()))
        self.staleness_end_max = max(self.staleness_end_max, int(newest.max()))

    @property
    def reward_mean(self) -> float:
        """Mean reward over the samples, 0 where there are none."""
        return float(Fraction(self.rewards, _UNITS * max(1, self.samples)))

    def array(self) -> NDArray[np.int64]:
        """Return all entries in the order of the fields, the last ``_DIGITS`` being the digits of ``rewards``."""
        digits = [self.rewards >> _DIGIT_BITS * place & _DIGIT for place in range(_DIGITS - 1)]
        last = self.rewards >> _DIGIT_BITS * (_DIGITS - 1)
        entries = [value for name, value in vars(self).items() if name != "rewards"]
        return np.array([*entries, *digits, last], dtype=np.int64)

    @classmethod
    def merged(cls, rows: NDArray[np.int64]) -> Tally:
        """Make one tally of the arrays of all ranks, [world, fields]."""
        total, highest = rows.sum(axis=0), rows.max(axis=0)
        names = [name for name in vars(cls()) if name != "rewards"]
        entries = {name: int((highest if name.endswith("_max") else total)[index]) for index, name in enumerate(names)}
        digits = enumerate(total[len(names) :].tolist())
        return cls(**entries, rewards=sum(digit << _DIGIT_BITS * place for place, digit in digits))


def _hashes(batch: MicroBatch) -> NDArray[np.uint64]:
    keys = np.array([(key.serial, key.sample) for key in batch.keys], dtype=np.uint64).reshape(-1, 2)
    mixed: NDArray[np.uint64] = keys[:, 0] * np.uint64(0x9E3779B97F4A7C15) + keys[:, 1]
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
    return mixed ^ (mixed >> np.uint64(31))
