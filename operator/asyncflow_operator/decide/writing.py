"""Whether a status is written: a transition at once, figures at most every ``FIGURES_S`` seconds, the same never.

Invariant: a status that says what the one before said causes no write, however often and however late it is decided.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, TypeVar

from asyncflow.api.conditions import Condition
from asyncflow.api.queue import QueueStatus
from asyncflow.api.status import JobStatus
from asyncflow.api.weights import WeightsStatus
from asyncflow_operator.decide.moments import Alarm, read, written
from asyncflow_operator.observed import Manifest

FIGURES_S: Final = 15.0
"""Least seconds between two writes of one status that differ in figures only."""
_SECOND: Final = 1.0
"""Most seconds by which a written moment is earlier than the real one."""

S = TypeVar("S", JobStatus, QueueStatus, WeightsStatus)


def to_write(before: S, after: S, *, figures: Collection[str], alarm: Alarm) -> Manifest | None:
    """Return the status to write now, None for none. figures: the fields that may wait."""
    changed = {name for name in type(after).model_fields if getattr(before, name) != getattr(after, name)}
    changed.discard("progress_time")
    if not changed:
        return None
    waits = changed <= {*figures, "conditions"} and _standing(before.conditions) == _standing(after.conditions)
    last = read(before.progress_time)
    if waits and last is not None and last <= alarm.now and alarm.until(last + FIGURES_S + _SECOND):
        return None
    return _dump(after.model_copy(update={"progress_time": written(alarm.now)}))


def _standing(conditions: Collection[Condition]) -> dict[str, tuple[str, str, int]]:
    """Return what of the conditions is a transition: all but the messages."""
    return {each.type: (each.status, each.reason, each.observed_generation) for each in conditions}


def _dump(status: S) -> dict[str, Any]:
    """Return the status as it is applied, without maps that are empty.

    Of a map that loses its last key the API server makes ``null`` when it is applied empty, and then refuses that.
    """
    said = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: value for name, value in said.items() if value != {}}
