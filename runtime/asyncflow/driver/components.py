"""Means of the components of a reward over the samples that a step trains.

The values travel as tags of the rows, so the driver has them when it decides a group.

Invariants: a group counts once per step, even if it is decided repeatedly; if an earlier driver decided some groups of
a step, the means of that step include only the groups that this driver decided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rewards.wire import COMPONENT

_MOST_STEPS: Final = 64
"""Number of steps kept: a restarted trainer trains the steps after its checkpoint again."""


class ComponentMeans:
    """The components of the groups of each step, by the serial of the group."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, list[dict[str, float]]]] = {}

    def take(self, step: int, serial: int, rows: Sequence[LeasedRow]) -> None:
        """Record the samples of a group that step ``step`` trains."""
        samples = [components_of(row) for row in rows]
        if not any(samples):
            return
        self._groups.setdefault(step, {})[serial] = samples
        while len(self._groups) > _MOST_STEPS:
            del self._groups[min(self._groups)]

    def of(self, step: int) -> dict[str, float]:
        """Return the mean of each component over the samples of a step that have it; empty if none is known."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        for samples in self._groups.get(step, {}).values():
            for sample in samples:
                for name, value in sample.items():
                    values[name].append(value)
        return {name: sum(parts) / len(parts) for name, parts in sorted(values.items())}


def components_of(row: LeasedRow) -> dict[str, float]:
    """Return the values of the named components of a sample's reward."""
    tags = row.meta.tags
    return {name.removeprefix(COMPONENT): float(value) for name, value in tags.items() if name.startswith(COMPONENT)}
