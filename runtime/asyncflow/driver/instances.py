"""State of rollouts, followers and tasks by their heartbeats: the version of each, how far behind it is, and why. Pure.

Invariants: what is returned of all of them together is bounded, however many there are; a cause is only what a
heartbeat says, or that there was none. An instance is as far behind as it was when its heartbeat was made: it is
compared with the newest version that it knew of then, and only one that is silent with what has come since.
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
"""Seconds without a heartbeat after which that is the reason for what an instance has not done."""
_SWAPS_WHEN: Final[Mapping[SwapAt, str]] = MappingProxyType(
    {"quota": "generating until its share is done", "sequence": "generating until its sequences end"}
)

Heard = tuple[Member, Status, float]
"""A member, what it said in its last heartbeat, and the seconds since."""


def heard_of(directory: Directory, role: str | None = None) -> list[Heard]:
    """Return all members of a directory, or those of a role, as they were heard last."""
    return [
        (member, directory.status(member.incarnation), directory.silent_s(member.incarnation) or 0.0)
        for member in directory.members(role)
    ]


def rollout_state(heard: Heard, *, newest: int | None, lag: int) -> RolloutState:
    """Return one rollout's state from its last heartbeat; it lags when it is further behind than the schedule says."""
    member, status, _ = heard
    version = _step_of(status, "version")
    standing: Standing = "ready"
    if status.get("draining"):
        standing = "draining"
    elif version is None:
        standing = "starting"
    elif _lag(heard, newest) > lag + 1:
        standing = "lagging"
    return RolloutState(
        id=member.incarnation,
        index=member.index,
        state=standing,
        version=version or 0,
        inflight=int(status.get("inflight", 0)),
    )


def task_states(graph: JobGraph, heard: Iterable[Heard], stats: QueueStats | None) -> dict[str, TaskState]:
    """Return the state of each task of training that is a role of its own, by name.

    heard: all members; stats: of the queue, None before the first. Of a client nobody knows which task it does.
    """
    of_role: dict[str, list[Status]] = {}
    for member, status, _ in heard:
        of_role.setdefault(member.role, []).append(status)
    states: dict[str, TaskState] = {}
    for task in graph.of(TRAIN):
        if not task.place:
            continue
        told = of_role.get(task.role, []) if task.role != CLIENT else []
        key = f"{TRAIN}/{task.name}"
        failed: Counter[str] = Counter()
        for status in told:
            failed.update({str(why): int(count) for why, count in dict(status.get("failed", {})).items()})
        states[task.name] = TaskState(
            role=task.role,
            replicas=len(told),
            ready=stats.ready.get(key, 0) if stats is not None else 0,
            leased=stats.leased.get(key, 0) if stats is not None else 0,
            done=sum(int(status.get("done", 0)) for status in told),
            failed=dict(failed),
            first_failure=next(filter(None, map(_last_line, told)), ""),
        )
    return states


def _last_line(status: Status) -> str:
    """Return the last line of what a process of a task says of its first failure."""
    return str(status.get("first_failure", "")).strip().rpartition("\n")[2][:256]


def versions_state(heard: Sequence[Heard], *, nbytes: int | None, newest: int | None, swap_at: SwapAt) -> VersionsState:
    """Return how versions reach those that load them.

    heard: all members; nbytes, newest: size and step of the newest version; swap_at: when rollouts swap.
    """
    publishing = [status for member, status, _ in heard if member.role in ("trainer", PUBLISHER)]
    loading = [each for each in heard if each[0].role in ("rollout", FOLLOWER)]
    serving = [each for each in loading if _step_of(each[1], "version") is not None]
    behind = {each[0].incarnation: _lag(each, newest) for each in serving}
    late = sorted((each for each in serving if behind[each[0].incarnation]), key=lambda each: _order(each, behind))
    counts = Counter(member.role for member, _, _ in serving)
    served = Counter(_step_of(status, "version") or 0 for _, status, _ in serving)
    told = [status for _, status, _ in loading]
    wire_bytes = median("wire_bytes", told)
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
            transfer=median("transfer_s", told),
            stage=median("stage_s", told),
            swap=median("swap_s", told),
        ),
    )


def fleets(heard: Iterable[Heard], *, nbytes: int | None, newest: int | None) -> dict[str, VersionsState]:
    """Return how versions reach the followers of one WeightSync alone, by its name: of the largest of such fleets.

    heard, nbytes, newest: see ``versions_state``.
    """
    publishing: list[Heard] = []
    found: dict[str, list[Heard]] = {}
    for each in heard:
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
    """Count instances by how many versions they are behind; the last entry that there can be counts those further."""
    counts = Counter(min(lag, LAG_BUCKETS - 1) for lag in lags)
    return tuple(counts[lag] for lag in range(max(counts, default=-1) + 1))


def median(figure: str, statuses: Iterable[Status]) -> float | None:
    """Return the median of a figure over those that report it, None where nobody does."""
    told = [float(status[figure]) for status in statuses if figure in status]
    return statistics.median(told) if told else None


def cause(status: Status, silent_s: float, *, swap_at: SwapAt) -> str:
    """Return why an instance does not serve the newest version, as far as its heartbeat ``silent_s`` ago tells."""
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
    return "has not begun to receive a newer version"


def _order(heard: Heard, behind: Mapping[str, int]) -> tuple[int, str, int]:
    member = heard[0]
    return -behind[member.incarnation], member.role, member.index


def _lag(heard: Heard, newest: int | None) -> int:
    _, status, silent_s = heard
    known = _step_of(status, "newest") if silent_s <= SILENT_S else None
    return max(0, ((newest or 0) if known is None else known) - (_step_of(status, "version") or 0))


def _step_of(status: Status, which: str) -> int | None:
    packed = status.get(which)
    return Version.unpack(packed).step if isinstance(packed, int) and packed >= 0 else None
