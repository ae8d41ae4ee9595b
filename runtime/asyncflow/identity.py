"""Identifiers of processes, samples, rows and weight versions.

Invariants:

* A ``SampleKey`` always names the same sample, also when that sample is generated again.
* A row id is never reused. It contains the location at which the row was created; the row may have moved since.
* Versions are totally ordered by (trainer attempt, step), so a step that is trained again makes a different version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NEWEST = 2**31 - 1
"""An upper bound for ``max_version``: any version, however new."""

_STEP_BITS = 32
_UNIT_BITS = 12
COUNTER_BITS = 32
"""Number of the lowest bits of a row id, which hold the counter; the unit and its epoch are in the bits above."""
_EPOCH_BITS = 19

_PROCESS = re.compile(r"asyncflow://([A-Za-z0-9._-]{1,128})/([a-z]{1,16}(?:-[a-z][a-z0-9]{0,15})?)/(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process: the unique name of its job, its role, and its index among the role's replicas."""

    job: str
    role: str
    index: int

    @property
    def uri(self) -> str:
        """The identity as a URI, as certificates contain it."""
        return f"asyncflow://{self.job}/{self.role}/{self.index}"

    @classmethod
    def of(cls, uri: str) -> ProcessIdentity | None:
        """Return the identity that ``uri`` names, or None if ``uri`` is not a valid one."""
        found = _PROCESS.fullmatch(uri)
        return None if found is None else cls(found[1], found[2], int(found[3]))

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class SampleKey(NamedTuple):
    """One sample: the prompt's serial in data order, and j within the prompt's group. The group is the serial."""

    serial: int
    sample: int


class Version(NamedTuple):
    """Weights after optimizer step ``step`` of trainer attempt ``attempt``; step 0 is the initial model."""

    attempt: int
    step: int

    @property
    def packed(self) -> int:
        """The version as one int64, whose order is the order of versions."""
        return self.attempt << _STEP_BITS | self.step

    @classmethod
    def unpack(cls, packed: int) -> Version:
        """Return the version that ``packed`` encodes."""
        return cls(packed >> _STEP_BITS, packed & (1 << _STEP_BITS) - 1)

    def __str__(self) -> str:
        return f"θ{self.step}" if self.attempt == 0 else f"θ{self.step}@{self.attempt}"


def steps_of(packed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the step of each packed version; without a loop, since a training step has one version per token."""
    return packed & (1 << _STEP_BITS) - 1


class RowPlace(NamedTuple):
    """Fields of a row id: the epoch that the controller granted to the unit, the unit, and a counter within both."""

    epoch: int
    unit: int
    counter: int

    @property
    def row(self) -> int:
        """The row id, a positive int64. Raises ValueError if a field is out of range."""
        if not (0 <= self.epoch < 1 << _EPOCH_BITS and 0 <= self.unit < 1 << _UNIT_BITS):
            raise ValueError(f"epoch {self.epoch} or unit {self.unit} does not fit a row id")
        if not 0 <= self.counter < 1 << COUNTER_BITS:
            raise ValueError(f"counter {self.counter} does not fit a row id")
        return (self.epoch << _UNIT_BITS | self.unit) << COUNTER_BITS | self.counter

    @classmethod
    def of(cls, row: int) -> RowPlace:
        """Return the fields of row id ``row``."""
        counter = row & (1 << COUNTER_BITS) - 1
        unit = row >> COUNTER_BITS & (1 << _UNIT_BITS) - 1
        return cls(row >> COUNTER_BITS + _UNIT_BITS, unit, counter)


def unit_of(row: int) -> int:
    """Return the unit at which row id ``row`` was created."""
    return row >> COUNTER_BITS & (1 << _UNIT_BITS) - 1


def location_of(row: int) -> int:
    """Return the location at which row id ``row`` was created: the epoch and the unit, combined in one int."""
    return row >> COUNTER_BITS


def location_at(epoch: int, unit: int) -> int:
    """Return the location of a unit in an epoch."""
    return epoch << _UNIT_BITS | unit


def epoch_of(location: int) -> int:
    """Return the epoch of a location."""
    return location >> _UNIT_BITS


def unit_at(location: int) -> int:
    """Return the unit of a location."""
    return location & (1 << _UNIT_BITS) - 1
