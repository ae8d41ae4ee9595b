"""Answers of the driver to those who look at a job from elsewhere: how each process does, and all that it knows.

``GET /v1/live`` says how processes and tasks do, for a view; ``GET /v1/evidence`` has what the files of a
run have, for whoever cannot read these (``asyncflow doctor``).

Invariant: neither answer holds settings of functions, plugins or pods, where a person may have put what is secret; the
second is bounded, by the newest ``MOST_LINES`` lines of each file.
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
"""Entries of a manifest whose content is free."""


class TaskDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one task of the queue: ready to be taken, and leased."""

    ready: int = 0
    leased: int = 0


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the job, by its last heartbeat.

    http: where it serves its metrics; age_s: since it began; silent_s: since that heartbeat; busy_s: seconds in which
    it worked, None where it does not say; tokens: response tokens that it has generated; running: sequences in
    generation; version, step: of the weights in use, and the last one made, -1 for none; state: in a few words.
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
    """Answer of ``GET /v1/live``. name: of the job; queue: by PARTITION/TASK, in the order of the flow."""

    name: str
    members: list[MemberState] = []
    queue: dict[str, TaskDepth] = {}


def live_state(name: str, members: list[MemberState], stats: QueueStats | None) -> LiveState:
    """Return how the members and the tasks of the queue do. stats: of the queue, None where they are not known."""
    ready, leased = (stats.ready, stats.leased) if stats is not None else ({}, {})
    tasks = dict.fromkeys((*ready, *leased))
    queue = {task: TaskDepth(ready=ready.get(task, 0), leased=leased.get(task, 0)) for task in tasks}
    return LiveState(name=name, members=members, queue=queue)


def member_state(member: Member, status: Status, *, silent_s: float) -> MemberState:
    """Return how ``member`` does by its last heartbeat, ``silent_s`` seconds ago."""
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
    """Return what a process says of itself in a few words, "" where it says nothing."""
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
    """Return what the files of a run say: its manifest, lines of steps and events, lives, and outcomes of rewards."""
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
