"""State of rollouts, followers and tasks from their heartbeats: the version of each, its lag, and the cause. Pure.

Invariants: the size of the state of all instances is bounded, independent of their number; a cause comes from a
heartbeat, or is the lack of one. The lag of an instance is the lag at its last heartbeat: its version is compared with
the newest version that it knew then. Only a silent instance is compared with the newest version of all.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from asyncflow.api.graph import JobGraph
from asyncflow.api.names import CLIENT, FLEET, FOLLOWER, PUBLISHER, TRAIN
from asyncflow.api.status import RolloutState, Standing, TaskState
from asyncflow.api.versions import (
    LAG_BUCKETS,
    MOST_FLEET_NAME,
    MOST_FLEETS,
    MOST_LAGGARDS,
    Laggard,
    PhaseSeconds,
    VersionCount,
    VersionsState,
)
from asyncflow.flow.instance import SwapAt
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Status

SILENT_S: Final = 2.5
"""Seconds without a heartbeat after which an instance counts as silent."""
_SWAPS_WHEN: Final[Mapping[SwapAt, str]] = MappingProxyType(
    {"quota": "generating until its share is done", "sequence": "generating until its sequences end"}
)

LastHeartbeat = tuple[Member, Status, float]
"""A member, the status in its last heartbeat, and the seconds since then."""


def last_heartbeats(directory: Directory, role: str | None = None) -> list[LastHeartbeat]:
    """Return the last heartbeats of all members of a directory, or of the members of one role."""
    return [
        (member, directory.status(member.incarnation), directory.silent_s(member.incarnation) or 0.0)
        for member in directory.members(role)
    ]


def rollout_state(heartbeat: LastHeartbeat, *, newest: int | None, lag: int) -> RolloutState:
    """Return the state of one rollout; it is lagging if it is more than the schedule's ``lag`` plus 1 behind."""
    member, status, _ = heartbeat
    version = _step_of(status, "version")
    standing: Standing = "ready"
    if status.get("draining"):
        standing = "draining"
    elif version is None:
        standing = "starting"
    elif _lag(heartbeat, newest) > lag + 1:
        standing = "lagging"
    return RolloutState(
        id=member.incarnation,
        index=member.index,
        state=standing,
        version=version or 0,
        inflight=int(status.get("inflight", 0)),
    )


def task_states(graph: JobGraph, heartbeats: Iterable[LastHeartbeat], stats: QueueStats | None) -> dict[str, TaskState]:
    """Return the state of each task of training that is a role of its own, by name.

    heartbeats: of all members; stats: statistics of the queue, None before the first. Members with the role of a client
    do not report their tasks and are not counted.
    """
    by_role: dict[str, list[Status]] = {}
    for member, status, _ in heartbeats:
        by_role.setdefault(member.role, []).append(status)
    states: dict[str, TaskState] = {}
    for task in graph.of(TRAIN):
        if not task.place:
            continue
        statuses = by_role.get(task.role, []) if task.role != CLIENT else []
        key = f"{TRAIN}/{task.name}"
        failed: Counter[str] = Counter()
        for status in statuses:
            failed.update({str(why): int(count) for why, count in dict(status.get("failed", {})).items()})
        states[task.name] = TaskState(
            role=task.role,
            replicas=len(statuses),
            ready=stats.ready.get(key, 0) if stats is not None else 0,
            leased=stats.leased.get(key, 0) if stats is not None else 0,
            done=sum(int(status.get("done", 0)) for status in statuses),
            failed=dict(failed),
            first_failure=next(filter(None, map(_last_line, statuses)), ""),
        )
    return states


def _last_line(status: Status) -> str:
    """Return the last line of the first failure that a process of a task reports."""
    return str(status.get("first_failure", "")).strip().rpartition("\n")[2][:256]


def versions_state(
    heartbeats: Sequence[LastHeartbeat], *, nbytes: int | None, newest: int | None, swap_at: SwapAt
) -> VersionsState:
    """Return the distribution of versions to the instances that load them.

    heartbeats: of all members; nbytes, newest: size and step of the newest version; swap_at: when rollouts swap.
    """
    publishing = [status for member, status, _ in heartbeats if member.role in ("trainer", PUBLISHER)]
    loading = [each for each in heartbeats if each[0].role in ("rollout", FOLLOWER)]
    serving = [each for each in loading if _step_of(each[1], "version") is not None]
    behind = {each[0].incarnation: _lag(each, newest) for each in serving}
    late = sorted((each for each in serving if behind[each[0].incarnation]), key=lambda each: _order(each, behind))
    counts = Counter(member.role for member, _, _ in serving)
    served = Counter(_step_of(status, "version") or 0 for _, status, _ in serving)
    statuses = [status for _, status, _ in loading]
    wire_bytes = median("wire_bytes", statuses)
    return VersionsState(
        rollouts=counts["rollout"],
        followers=counts[FOLLOWER],
        behind=len(late),
        serving=tuple(
            VersionCount(version=version, instances=count) for version, count in sorted(served.items(), reverse=True)
        )[:LAG_BUCKETS],
        lag=histogram(behind.values()),
        laggards=tuple(
            Laggard(
                id=member.incarnation,
                version=_step_of(status, "version") or 0,
                lag=behind[member.incarnation],
                cause=cause(status, silent_s, swap_at=swap_at if member.role == "rollout" else "token"),
            )
            for member, status, silent_s in late[:MOST_LAGGARDS]
        ),
        bytes=nbytes,
        wire_bytes=None if wire_bytes is None else int(wire_bytes),
        seconds=PhaseSeconds(
            publish=median("publish_s", publishing),
            transfer=median("transfer_s", statuses),
            stage=median("stage_s", statuses),
            swap=median("swap_s", statuses),
        ),
    )


def fleets(heartbeats: Iterable[LastHeartbeat], *, nbytes: int | None, newest: int | None) -> dict[str, VersionsState]:
    """Return the distribution of versions to each of the largest fleets, by the name of its WeightSync.

    heartbeats, nbytes, newest: see ``versions_state``.
    """
    publishing: list[LastHeartbeat] = []
    found: dict[str, list[LastHeartbeat]] = {}
    for each in heartbeats:
        member = each[0]
        name = str(member.info.get(FLEET, ""))[:MOST_FLEET_NAME]
        if member.role == FOLLOWER and name:
            found.setdefault(name, []).append(each)
        elif member.role == "trainer":
            publishing.append(each)
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:MOST_FLEETS]
    return {
        name: versions_state([*publishing, *found[name]], nbytes=nbytes, newest=newest, swap_at="token")
        for name in largest
    }


def histogram(lags: Collection[int]) -> tuple[int, ...]:
    """Return the number of instances by lag; the last possible entry also counts all larger lags."""
    counts = Counter(min(lag, LAG_BUCKETS - 1) for lag in lags)
    return tuple(counts[lag] for lag in range(max(counts, default=-1) + 1))


def median(figure: str, statuses: Iterable[Status]) -> float | None:
    """Return the median of a figure over the statuses that contain it, None if none does."""
    values = [float(status[figure]) for status in statuses if figure in status]
    return statistics.median(values) if values else None


def cause(status: Status, silent_s: float, *, swap_at: SwapAt) -> str:
    """Return why an instance does not serve the newest version, from its heartbeat ``silent_s`` seconds ago."""
    current, staged, receiving = (_step_of(status, which) for which in ("version", "staged", "receiving"))
    if silent_s > SILENT_S:
        return f"no heartbeat for {silent_s:.0f} s"
    if status.get("draining"):
        return "draining"
    if staged is not None and staged != current:
        when = "waits for a permit" if status.get("waits_permit") else _SWAPS_WHEN.get(swap_at)
        return f"θ_{staged} is here; {when if when and status.get('running', True) else 'about to swap'}"
    if receiving is not None:
        return f"receiving θ_{receiving}, {float(status.get('received', 0.0)):.0%} of it here"
    return "has not started to receive a newer version"


def _order(heartbeat: LastHeartbeat, behind: Mapping[str, int]) -> tuple[int, str, int]:
    member = heartbeat[0]
    return -behind[member.incarnation], member.role, member.index


def _lag(heartbeat: LastHeartbeat, newest: int | None) -> int:
    _, status, silent_s = heartbeat
    known = _step_of(status, "newest") if silent_s <= SILENT_S else None
    return max(0, ((newest or 0) if known is None else known) - (_step_of(status, "version") or 0))


def _step_of(status: Status, which: str) -> int | None:
    packed = status.get(which)
    return Version.unpack(packed).step if isinstance(packed, int) and packed >= 0 else None
