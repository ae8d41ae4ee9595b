"""Rollouts: as many as are wanted, each on its own; whoever has to leave hands its work back first.

Who leaves is chosen once and put on record, then drained through the driver, then deleted: when the driver has let it
go, when it has ended, or when its time is over. A rollout that does not run, or that no driver knows, has nothing to
hand back.

Invariant: rollouts that stay are never touched, and what happens to rollouts never reads or changes another role.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asyncflow.api.status import Leaving, RoleRecord, RolloutState
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Ask
from asyncflow_operator.decide.failure import cleared, end_of
from asyncflow_operator.decide.moments import Alarm, read, written
from asyncflow_operator.decide.seats import Moves, Seat, removed
from asyncflow_operator.observed import PodView, Probe

LET_GO_S: Final = 10.0
"""Seconds beyond its drain time after which a rollout is deleted whatever the driver says."""
FRESH_S: Final = 30.0
"""Seconds for which an answer of the driver counts as what is."""
_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Rollouts after a decision. staying: pods that count for ``replicas``; leaving: those on their way out."""

    staying: int
    leaving: tuple[Leaving, ...]
    moves: Moves


@dataclass(frozen=True, slots=True)
class Registered:
    """The rollouts that the driver knows, by index, as of ``at``; None: it does not say."""

    by_index: Mapping[int, RolloutState] | None
    at: float

    @classmethod
    def of(cls, probe: Probe, now: float) -> Registered:
        """Read the driver's last answer."""
        if probe.status is None or now - probe.at > FRESH_S:
            return cls(None, probe.at)
        return cls({each.index: each for each in probe.status.rollouts if each.state != "lost"}, probe.at)


def still_leaving(draining: Sequence[Leaving], pods: Collection[PodView]) -> tuple[Leaving, ...]:
    """Return those of ``draining`` whose pods are still there."""
    there = {pod.uid for pod in pods}
    return tuple(each for each in draining if each.uid in there)


def tend_rollouts(
    role: Role,
    pods: Collection[PodView],
    record: RoleRecord,
    *,
    target: int,
    leaving: tuple[Leaving, ...],
    registered: Registered,
    drain_s: float,
    open_: bool,
    alarm: Alarm,
    core: int = 0,
) -> Crew:
    """Make or drain pods until ``target`` rollouts run beside those ``leaving``.

    open_: whether pods may be made now; drain_s: seconds that a rollout has to hand back its work; core: how many,
    from index 0 on, have their place with the gang and leave last.
    """
    chosen = {each.uid for each in leaving}
    holders = [pod for pod in pods if pod.uid not in chosen]
    spare = min(max(len(holders) - target, 0), _AT_ONCE - len(leaving))
    victims = sorted(holders, key=lambda pod: (pod.index < core, *_worth(pod, registered)))[:spare]
    leaving += tuple(Leaving(name=pod.name, uid=pod.uid, since=written(alarm.now)) for pod in victims)
    since = {each.uid: read(each.since) or 0.0 for each in leaving}
    staying = [pod for pod in holders if pod.uid not in since]
    moves = Moves(
        make=_new_seats(role, pods, record, count=target - len(staying)) if open_ else (),
        remove=removed((pod for pod in staying if cleared(role.restart, record, pod, alarm)), alarm),
    )
    for pod in pods:
        if pod.uid in since:
            moves += _out(pod, registered, since=since[pod.uid], drain_s=drain_s, alarm=alarm)
    return Crew(staying=len(staying), leaving=leaving, moves=moves)


def _worth(pod: PodView, registered: Registered) -> tuple[bool, int, int, int]:
    """Return the order in which rollouts leave: not running, fewest in flight, oldest version, highest index."""
    known = (registered.by_index or {}).get(pod.index)
    runs = pod.phase == "Running" and end_of(pod) is None
    return runs, known.inflight if known else 0, known.version if known else 0, -pod.index


def _new_seats(role: Role, pods: Collection[PodView], record: RoleRecord, *, count: int) -> tuple[Seat, ...]:
    taken = {pod.index for pod in pods}
    free = (index for index in range(len(taken) + max(count, 0)) if index not in taken)
    return tuple(Seat(role.name, index, record.attempt) for index, _ in zip(free, range(count), strict=False))


def _out(pod: PodView, registered: Registered, *, since: float, drain_s: float, alarm: Alarm) -> Moves:
    """Bring one rollout out."""
    idle = pod.phase != "Running" or pod.deleting or registered.by_index is None
    if idle or not alarm.until(since + drain_s + LET_GO_S):
        return Moves(remove=removed([pod], alarm))
    known = (registered.by_index or {}).get(pod.index)
    if known is None:
        waits = registered.at < since and alarm.until(since + LET_GO_S)
        return Moves() if waits else Moves(remove=removed([pod], alarm))
    if known.state == "draining":
        return Moves()
    return Moves(ask=(Ask(path=f"/v1/rollouts/{known.id}/drain"),))
