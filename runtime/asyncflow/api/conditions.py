"""Standard conditions, as every Kubernetes tool reads them.

Invariant: a list holds one condition of each type, and ``lastTransitionTime`` moves only when ``status`` does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import Spec, keyed_by

Time = Annotated[str, StringConstraints(max_length=35)]
"""RFC 3339 in UTC, e.g. ``2026-11-21T10:46:00Z``."""


class Condition(Spec):
    """One aspect of an object's state."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)]
    """Aspect that it is about, e.g. Ready, Progressing, Stalled."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """One word for machines."""
    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    """One sentence for people: what, why, and what to do."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that it speaks of."""
    last_transition_time: Time
    """Time at which status last changed."""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=keyed_by("type"))]


def with_condition(conditions: tuple[Condition, ...], new: Condition) -> tuple[Condition, ...]:
    """Return ``conditions`` with ``new`` in place of the one of its type; the time stays where the status does."""
    before = next((condition for condition in conditions if condition.type == new.type), None)
    if before is None:
        return (*conditions, new)
    if before.status == new.status:
        new = new.model_copy(update={"last_transition_time": before.last_transition_time})
    return tuple(new if condition.type == new.type else condition for condition in conditions)
