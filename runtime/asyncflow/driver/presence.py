"""Answers of the driver to remote observers of a job.

``GET /v1/live`` returns the state of each process and task, for a view. ``GET /v1/evidence`` returns the content of the
run's files, for a client without access to them (``asyncflow doctor``).

Invariants: neither answer contains settings of functions, plugins or pods, which may contain secrets; the second answer
is bounded: it has the newest ``MOST_LINES`` lines of each file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncflow.api.job import RLJob
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.rpc.membership import AGE, FIGURES, Member, Status

MOST_LINES = 2000
_PRIVATE = frozenset({"annotations", "config", "options", "template"})
"""Entries of a manifest with free-form content."""


class TaskDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Number of ready rows and of leased rows of one task of the queue."""

    ready: int = 0
    leased: int = 0


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the job, from its last heartbeat.

    http: address of its metrics; age_s: seconds since its start; silent_s: seconds since the heartbeat; busy_s: seconds
    of work, None if not reported; tokens: generated response tokens; running: running sequences; slots: most running
    sequences; version: packed version of the loaded weights, -1 for none; step: last step that it made, -1 for none;
    state: a short description; figures: its metrics by name.
    """

    role: str
    index: int
    attempt: int = 0
    http: str = ""
    age_s: float = 0.0
    silent_s: float = 0.0
    busy_s: float | None = None
    tokens: int = 0
    running: int = 0
    slots: int = 0
    version: int = -1
    step: int = -1
    state: str = ""
    figures: dict[str, float] = {}


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/live``. name: name of the job; queue: depth of each task by PARTITION/TASK, in the order in
    which the queue reports them.
    """

    name: str
    members: list[MemberState] = []
    queue: dict[str, TaskDepth] = {}


def live_state(name: str, members: list[MemberState], stats: QueueStats | None) -> LiveState:
    """Return the state of the members and of the queue's tasks. stats: statistics of the queue, None if unknown."""
    ready, leased = (stats.ready, stats.leased) if stats is not None else ({}, {})
    tasks = dict.fromkeys((*ready, *leased))
    queue = {task: TaskDepth(ready=ready.get(task, 0), leased=leased.get(task, 0)) for task in tasks}
    return LiveState(name=name, members=members, queue=queue)


def member_state(member: Member, status: Status, *, silent_s: float) -> MemberState:
    """Return the state of ``member`` from its last heartbeat, ``silent_s`` seconds ago."""
    return MemberState(
        role=member.role,
        index=member.index,
        attempt=member.attempt,
        http=member.http,
        age_s=float(status.get(AGE, 0.0)) + silent_s,
        silent_s=silent_s,
        busy_s=float(status["busy_s"]) if "busy_s" in status else None,
        tokens=int(status.get("tokens_generated", 0)),
        running=int(status.get("running", 0)),
        slots=int(status.get("slots", 0)),
        version=int(status.get("version", -1)),
        step=int(status.get("step", -1)),
        state=_state(status),
        figures=status.get(FIGURES, {}),
    )


def _state(status: Status) -> str:
    """Return a short description of a process from its status, "" if there is nothing to report."""
    if status.get("draining"):
        return "draining"
    doing = (
        f"publishing θ_{status['publishing']}" if int(status.get("publishing", -1)) >= 0 else "",
        "writing a checkpoint" if status.get("saving") else "",
        f"waiting for {status['waiting_for']}" if status.get("waiting_for") else "",
    )
    return ", ".join(filter(None, doing))


def evidence_of(
    job: RLJob,
    *,
    steps: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    lives: Mapping[str, Any],
    rewards: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of the run's files: manifest, lines of steps and events, lives, and outcomes of rewards."""
    manifest = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "job": _public(manifest),
        "steps": list(steps[-MOST_LINES:]),
        "events": list(events[-MOST_LINES:]),
        "lives": dict(lives),
        "rewards": dict(rewards),
    }


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(entry) for key, entry in value.items() if key not in _PRIVATE}
    return [_public(entry) for entry in value] if isinstance(value, list) else value
