"""Alternative schedules for a job: modes, ways of updating weights, staleness.

Invariant: every returned schedule satisfies all rules of the API together with the rest of the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from asyncflow.api.job import RLJobSpec
from asyncflow.api.schedule import ScheduleSpec

_STALENESS: Final = (1, 2, 4)
"""Values of maximum staleness that are tried, in units of ``syncEvery``."""


def alternatives(spec: RLJobSpec) -> list[ScheduleSpec]:
    """Return the schedules that the job could have, including its own, the strictest first."""
    found = [schedule for fields in _tried(spec.schedule) if (schedule := _valid(spec, fields)) is not None]
    return [*dict.fromkeys((*found, spec.schedule))]


def described(schedule: ScheduleSpec) -> str:
    """Return a short description: ``async, delayed at quota``, ``async, staggered at sequence, staleness 2``."""
    if schedule.mode != "async":
        return schedule.mode
    words = f"async, {schedule.update} at {schedule.swap_at}"
    return words if schedule.swap_at == "quota" else f"{words}, staleness {schedule.max_staleness}"


def changes(spec: RLJobSpec, after: ScheduleSpec) -> list[str]:
    """Return the ``--set`` arguments that give a job another schedule."""
    old, new = (each.model_dump(by_alias=True, mode="json", exclude_none=True) for each in (spec.schedule, after))
    drop_stagger = spec.weight_sync.stagger is not None and after.update != "staggered"
    values = [f"schedule.{name}={value}" for name, value in new.items() if old.get(name) != value]
    return [*values, *(["weightSync.stagger=null"] if drop_stagger else [])]


def _tried(own: ScheduleSpec) -> Iterator[Mapping[str, Any]]:
    yield {"mode": "sync"}
    yield {"mode": "periodic"}
    yield {"mode": "async", "update": "delayed", "swap_at": "quota"}
    kept = {"sync_every": own.sync_every, "staleness_threshold": own.staleness_threshold, "fill": own.fill}
    kept["require_batches"] = own.require_batches if own.mode == "async" else 0
    for swap_at in ("sequence", "token"):
        for staleness in _STALENESS:
            for update in ("delayed", "staggered"):
                yield {
                    "mode": "async",
                    "update": update,
                    "swap_at": swap_at,
                    "max_staleness": staleness * own.sync_every,
                    **kept,
                }


def _valid(spec: RLJobSpec, fields: Mapping[str, Any]) -> ScheduleSpec | None:
    """Return a schedule; None if it violates a rule, by itself or in this job. The job's stagger may be removed."""
    weights = spec.weight_sync.model_copy(update={"stagger": None}).model_dump(by_alias=True)
    try:
        schedule = ScheduleSpec(**fields, max_inflight=spec.schedule.max_inflight)
        parts = {"schedule": schedule.model_dump(by_alias=True), "weightSync": weights}
        RLJobSpec.model_validate({**spec.model_dump(by_alias=True), **parts})
    except ValidationError:
        return None
    return schedule
