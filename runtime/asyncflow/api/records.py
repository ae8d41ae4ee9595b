"""Records that the operator keeps in the status of what it makes pods for: ends of processes, and Secrets written.

Invariant: a record is bounded, however long its owner lives.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from asyncflow.api.base import Spec, Time
from asyncflow.api.versions import Count

RoleKey = Annotated[str, StringConstraints(max_length=64)]
Uid = Annotated[str, StringConstraints(max_length=64)]


class RoleRecord(Spec):
    """Record of a role's processes, so that no end counts twice and no attempt of a gang is used twice."""

    attempt: Count = 0
    """Attempt of the next process; it only grows."""
    begun: bool = False
    """Of a gang: whether processes of this attempt may exist."""
    whole: bool = False
    """Of a gang: whether all of this attempt have existed."""
    restarts: Count = 0
    """Failures within the window."""
    disruptions: Count = 0
    """Ends within the window that another process caused."""
    window_start: Time | None = None
    """Time at which the window began."""
    in_a_row: Count = 0
    """Ends in a row."""
    last_failure: Time | None = None
    """Time at which the last end was counted."""
    counted: Annotated[tuple[Uid, ...], Field(max_length=256)] = ()
    """UIDs of pods whose end is counted and that may still exist."""


class SecretRecord(Spec):
    """A Secret that the operator has written, so that it need not be read."""

    name: Annotated[str, StringConstraints(max_length=253)]
    """Its name."""
    leaves: Count = 0
    """Certificates in it."""
    period: Count = 0
    """Period of the certificates; each is of two days."""
    time: Time
    """Time at which it was written."""


SecretRecords = Annotated[dict[RoleKey, SecretRecord], Field(max_length=128)]
