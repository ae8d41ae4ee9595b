"""Records that the operator keeps in an object's status: ends of its processes, and Secrets written for it.

Invariant: the size of a record is bounded, however long its owner lives.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from asyncflow.api.base import Spec, Time
from asyncflow.api.versions import Count

RoleKey = Annotated[str, StringConstraints(max_length=64)]
Uid = Annotated[str, StringConstraints(max_length=64)]


class RoleRecord(Spec):
    """Record of a role's processes, so that each end counts once and each attempt of a gang is used once."""

    attempt: Count = 0
    """Attempt of the next process; it only increases."""
    begun: bool = False
    """For a gang: processes of this attempt may exist."""
    whole: bool = False
    """For a gang: all processes of this attempt have existed."""
    restarts: Count = 0
    """Failures within the window."""
    disruptions: Count = 0
    """Ends within the window that another process caused."""
    window_start: Time | None = None
    """Time at which the window began."""
    in_a_row: Count = 0
    """Consecutive ends."""
    last_failure: Time | None = None
    """Time at which the last end was counted."""
    counted: Annotated[tuple[Uid, ...], Field(max_length=256)] = ()
    """UIDs of pods that may still exist and whose end was counted."""


class SecretRecord(Spec):
    """A Secret that the operator has written, recorded so that it does not have to read it."""

    name: Annotated[str, StringConstraints(max_length=253)]
    """Name."""
    leaves: Count = 0
    """Number of certificates in it."""
    period: Count = 0
    """Number of the two-day period of the certificates."""
    time: Time
    """Time at which it was written."""


SecretRecords = Annotated[dict[RoleKey, SecretRecord], Field(max_length=128)]
