"""Sums, maxima and one histogram of a step, which add up over micro-batches and ranks.

Invariant: what is kept is bounded, whatever the number of tokens, and merging does not depend on how the tokens were
split; a quantile is never below the true one and at most 1.2 % above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

_FLOOR = 1e-9
_PER_DECADE = 200
_DECADES = 12
_BINS = _PER_DECADE * _DECADES + 2


class Histogram:
    """Counts of non-negative values in bins of equal ratio from 1e-9 to 1e3; the first bin is below, the last above."""

    def __init__(self, counts: NDArray[np.float64] | None = None) -> None:
        self.counts = np.zeros(_BINS) if counts is None else counts

    def add(self, values: NDArray[np.floating]) -> None:
        """Count ``values`` [n] >= 0."""
        scaled = np.log10(np.maximum(values, _FLOOR / 10) / _FLOOR) * _PER_DECADE
        bins = np.clip(np.floor(scaled) + 1, 0, _BINS - 1).astype(np.int64)
        self.counts += np.bincount(bins, minlength=_BINS)

    def quantile(self, q: float) -> float:
        """Return the upper edge of the bin that holds quantile ``q``; nan where nothing was counted."""
        total = self.counts.sum()
        if not total:
            return float("nan")
        index = int(np.searchsorted(np.cumsum(self.counts), np.ceil(q * total)))
        return float("inf") if index == _BINS - 1 else float(_FLOOR * 10 ** (index / _PER_DECADE))


class Meter:
    """Named sums and maxima beside a histogram; ``array`` and ``merged`` carry it between ranks."""

    def __init__(self, *, sums: Sequence[str], maxima: Sequence[str]) -> None:
        self.sums = dict.fromkeys(sums, 0.0)
        self.maxima = dict.fromkeys(maxima, float("-inf"))
        self.histogram = Histogram()

    def add(self, values: Iterable[tuple[str, float]]) -> None:
        """Add to sums, or raise maxima, by name."""
        for name, value in values:
            if name in self.sums:
                self.sums[name] += value
            else:
                self.maxima[name] = max(self.maxima[name], value)

    def array(self) -> NDArray[np.float64]:
        """Return everything as float64[n], the same n on every rank."""
        return np.concatenate([list(self.sums.values()), list(self.maxima.values()), self.histogram.counts])

    def merged(self, rows: NDArray[np.float64]) -> Self:
        """Return the meter that all the ranks' arrays, [world, n], make together."""
        one = type(self)(sums=list(self.sums), maxima=list(self.maxima))
        added, highest = rows.sum(axis=0).tolist(), rows.max(axis=0).tolist()
        one.sums = dict(zip(self.sums, added, strict=False))
        one.maxima = dict(zip(self.maxima, highest[len(self.sums) :], strict=False))
        one.histogram = Histogram(rows.sum(axis=0)[len(self.sums) + len(self.maxima) :])
        return one
