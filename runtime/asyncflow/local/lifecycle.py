"""Pure state machine of a job's processes: which run, which restart, when the job is over, in which order all end.

The caller reads the clock and carries out the decisions; an ``Event`` reports what happened.

A *restart group* starts and ends together: it is one replica, or all ranks of a gang. When a member fails, the other
members are ended, and the whole group restarts as the next attempt. If members of a gang had already ended with
success, they restart, too. If a role is scaled, its replicas with the lowest indices run. A surplus replica *leaves*,
which is no failure, and restarts, as the next attempt, only when it is wanted again. A group that ended because the
leader dismissed it restarts if the leader fails, since the next leader needs it, or if the leader keeps running.

At the end of a job, the roles end in this order: rollouts and tasks, which return their leased rows; trainers, which
may write a checkpoint; the critic and the driver; controllers and storage units; and the stores of storage units.

Invariants:

* The attempt of a replica only grows. No two processes of one replica are ever alive at the same time, since a group
  starts only when all its replicas are down.
* No interval of a policy's ``window_s`` seconds contains more than ``max_restarts`` granted restarts.
* The result, once set, never changes.
* Every replica that is to end is in exactly one stage, and the last stage is over after ``within_s`` seconds.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from asyncflow.plan.roles import DISRUPTED, MOST_DISRUPTIONS, REFUSED, RestartPolicy, Role

CANNOT_START = 127
"""Exit status that represents a process that could not be started."""

LONGEST_S = 60.0
"""Longest delay of a restart, in seconds."""
SETTLED_S = 20.0
"""After running for this many seconds, a process counts as healthy: its next failure is the first of a new series."""
_MOST_DOUBLINGS = 32

WITHIN_S = 8.0
"""Seconds in which all roles must end, unless the job sets another time, so that Ctrl-C takes less than 10 s."""
_FIRST_BY = 0.25
_ORDER: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"trainer"}), 0.65),
    (frozenset({"critic", "driver"}), 0.8),
    (frozenset({"controller", "storage"}), 0.9),
    (frozenset({"holder", "master"}), 1.0),
)
"""Roles in the order in which they end, and the share of the time after which the processes still alive are killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitStatus:
    """The end of one process: an exit status from 0 to 255, or the number of the signal that ended it."""

    status: int = 0
    signal: int = 0

    @classmethod
    def of(cls, wait_status: int) -> ExitStatus:
        """Read the status word of ``os.waitpid``."""
        if os.WIFSIGNALED(wait_status):
            return cls(signal=os.WTERMSIG(wait_status))
        return cls(status=os.WEXITSTATUS(wait_status))

    @property
    def ok(self) -> bool:
        """True if the process ended by itself and reported no failure."""
        return self.status == 0 and self.signal == 0

    @property
    def final(self) -> bool:
        """True if another attempt would end in the same way."""
        return self.status == REFUSED

    @property
    def disrupted(self) -> bool:
        """True if the process lost its work because another process ended, which is no failure of its role."""
        return self.status == DISRUPTED

    def __str__(self) -> str:
        if not self.signal:
            return f"exit status {self.status}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


def restart_delay(policy: RestartPolicy, failures: int) -> float:
    """Return the seconds to wait after ``failures`` consecutive failures; 0 after none."""
    return float(min(policy.backoff_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), LONGEST_S)) if failures else 0.0


@dataclass(slots=True)
class RestartBudget:
    """The restarts that one role has used within its window (``granted``: their times)."""

    policy: RestartPolicy
    granted: deque[float] = field(default_factory=deque)

    def grant(self, now: float) -> bool:
        """Take one restart at ``now`` (seconds, never decreasing); return False if the budget is used up."""
        while self.granted and self.granted[0] <= now - self.policy.window_s:
            self.granted.popleft()
        if len(self.granted) >= self.policy.max_restarts:
            return False
        self.granted.append(now)
        return True


@dataclass(frozen=True, order=True, slots=True)
class LocalReplica:
    """One replica of a role."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class ProcessState(StrEnum):
    """State of a replica.

    waiting: it is to be started; running; ending: it was told to end because its group restarts; down: it ended, and
    the rest of its group is still ending; leaving: it was told to end because fewer replicas are wanted; left: it ended
    after leaving; done: it ended with success; ended: it ended in another way after the job had its result.
    """

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    DOWN = "down"
    LEAVING = "leaving"
    LEFT = "left"
    DONE = "done"
    ENDED = "ended"


class Start(NamedTuple):
    """Start this replica now, as this attempt."""

    replica: LocalReplica
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """A scheduled restart of a group, as ``attempt``, in ``delay_s`` seconds; ``culprit`` ended with ``status``."""

    replicas: tuple[LocalReplica, ...]
    attempt: int
    delay_s: float
    culprit: LocalReplica
    status: ExitStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """Result of a job. On a failure, ``culprit``, if set, ended with ``status`` and may not restart; see ``reason``."""

    ok: bool
    culprit: LocalReplica | None = None
    status: ExitStatus = field(default_factory=ExitStatus)
    reason: str = ""


@dataclass(slots=True)
class _RestartGroup:
    role: Role
    attempt: int
    states: dict[LocalReplica, ProcessState]
    start_at: float
    failures: int = 0
    started_at: float = 0.0


class ProcessTable:
    """The replicas of a job. Times are seconds of one monotonic clock that the caller reads."""

    def __init__(self, roles: Sequence[Role], *, now: float, attempts: Mapping[str, int] | None = None) -> None:
        """Add every replica, to be started at ``now``; ``attempts``: first attempts of roles, if not 0."""
        self._first = dict(attempts or {})
        self._roles: dict[str, Role] = {role.name: role for role in roles}
        self._wanted: dict[str, int] = {role.name: role.replicas for role in roles}
        self._budgets: dict[str, RestartBudget] = {role.name: RestartBudget(role.restart) for role in roles}
        self._disruptions: dict[str, RestartBudget] = {
            role.name: RestartBudget(replace(role.restart, max_restarts=MOST_DISRUPTIONS)) for role in roles
        }
        self._led = any(role.leader for role in roles)
        self._group_of: dict[LocalReplica, _RestartGroup] = {}
        self._result: JobResult | None = None
        for role in roles:
            replicas = [LocalReplica(role.name, index) for index in range(role.replicas)]
            for members in [replicas] if role.gang else [[replica] for replica in replicas]:
                self._add(role, members, now)

    def _add(self, role: Role, members: Sequence[LocalReplica], now: float) -> None:
        states = dict.fromkeys(members, ProcessState.WAITING)
        group = _RestartGroup(role, self._first.get(role.name, 0), states, start_at=now)
        self._group_of.update(dict.fromkeys(members, group))

    @property
    def result(self) -> JobResult | None:
        """Result of the job, or None while it runs."""
        return self._result

    @property
    def replicas(self) -> dict[LocalReplica, tuple[ProcessState, int]]:
        """Every replica in plan order, with its state and its attempt."""
        return {replica: (group.states[replica], group.attempt) for replica, group in self._group_of.items()}

    def stop(self, reason: str) -> None:
        """End the job on an external request, for ``reason``; nothing starts afterwards.

        The call has no effect if the job has a result.
        """
        self._result = self._result or JobResult(ok=False, reason=reason)

    def scale(self, name: str, replicas: int, now: float) -> list[LocalReplica]:
        """Set the number of replicas of a role that is no gang; return the replicas that the caller must end.

        The replicas 0 to ``replicas`` - 1 are wanted. The call is idempotent, and has no effect once there is a result.
        """
        if self._result is not None:
            return []
        self._wanted[name] = replicas
        for index in range(replicas):
            self._join(LocalReplica(name, index), now)
        leaving = []
        for replica, group in self._group_of.items():
            if replica.role != name or replica.index < replicas:
                continue
            if group.states[replica] is ProcessState.RUNNING:
                group.states[replica] = ProcessState.LEAVING
                leaving.append(replica)
            elif group.states[replica] in (ProcessState.WAITING, ProcessState.DONE):
                group.states[replica] = ProcessState.LEFT
        return leaving

    def _join(self, replica: LocalReplica, now: float) -> None:
        """Schedule the start of a replica that does not exist or has left; one that is leaving starts after that."""
        group = self._group_of.get(replica)
        if group is None:
            self._add(self._roles[replica.role], [replica], now)
        elif group.states[replica] is ProcessState.LEFT:
            group.states[replica] = ProcessState.WAITING
            group.attempt, group.start_at, group.failures = group.attempt + 1, now, 0

    def wake_at(self) -> float | None:
        """Return the next time at which ``recall`` or ``due`` must be called, or None."""
        return min(
            (
                group.start_at
                for replica, group in self._group_of.items()
                if group.states[replica] is ProcessState.WAITING or self._was_dismissed(group)
            ),
            default=None,
        )

    def recall(self, now: float) -> list[LocalReplica]:
        """Schedule the next attempt of each group that the leader dismissed without ending itself in time.

        Return the replicas of these groups that still run; the caller must end them.
        """
        ending: list[LocalReplica] = []
        for group in self._group_of.values():
            if group.start_at <= now and self._was_dismissed(group):
                group.failures = 0
                ending += self._next_attempt(group, now)
        return ending

    def due(self, now: float) -> list[Start]:
        """Return the replicas to start at ``now``, in plan order, and mark them as running."""
        starts = []
        for replica, group in self._group_of.items():
            if self._result is None and group.states[replica] is ProcessState.WAITING and group.start_at <= now:
                group.states[replica] = ProcessState.RUNNING
                group.started_at = now
                starts.append(Start(replica, group.attempt))
        return starts

    def still_due(self, start: Start) -> bool:
        """Return whether a start that ``due`` returned is still valid: its gang may have ended, or it may have left."""
        group = self._group_of[start.replica]
        return (group.states[start.replica], group.attempt) == (ProcessState.RUNNING, start.attempt)

    def ended(self, replica: LocalReplica, status: ExitStatus, now: float) -> tuple[list[LocalReplica], Restart | None]:
        """Record that a running replica has ended.

        Return the other replicas of its group that the caller must end, and the restart if one was decided now.
        """
        group = self._group_of[replica]
        if self._result is not None:
            group.states[replica] = ProcessState.DONE if status.ok else ProcessState.ENDED
            return [], None
        if group.states[replica] is ProcessState.LEAVING:
            group.states[replica] = ProcessState.LEFT
            if replica.index < self._wanted[replica.role]:
                self._join(replica, now)
            return [], None
        if group.states[replica] is ProcessState.ENDING:
            group.states[replica] = ProcessState.DOWN
            self._restart_if_down(group, now)
            return [], None
        if status.ok:
            group.states[replica], group.start_at = ProcessState.DONE, now + group.role.restart.dismissed_s
            self._check_done(group.role)
            return [], None
        group.states[replica] = ProcessState.DOWN
        return self._failed(group, replica, status, now)

    def _check_done(self, role: Role) -> None:
        finished = (ProcessState.DONE, ProcessState.LEFT)
        all_done = all(group.states[replica] in finished for replica, group in self._group_of.items())
        if role.leader or (all_done and not self._led):
            self._result = JobResult(ok=True)

    def _failed(
        self, group: _RestartGroup, replica: LocalReplica, status: ExitStatus, now: float
    ) -> tuple[list[LocalReplica], Restart | None]:
        if status.final:
            self._result = JobResult(ok=False, culprit=replica, status=status, reason="it refused its input")
            return [], None
        budget = (self._disruptions if status.disrupted else self._budgets)[replica.role]
        if not budget.grant(now):
            limit = budget.policy
            reason = f"all {limit.max_restarts} restarts within {limit.window_s:.0f} s are used up"
            self._result = JobResult(ok=False, culprit=replica, status=status, reason=reason)
            return [], None
        group.failures = 1 if now - group.started_at >= SETTLED_S else group.failures + 1
        others = self._next_attempt(group, now)
        if group.role.leader:
            self._schedule_done_groups(now)
        wait = restart_delay(group.role.restart, group.failures)
        return others, Restart(
            replicas=tuple(group.states), attempt=group.attempt, delay_s=wait, culprit=replica, status=status
        )

    def _next_attempt(self, group: _RestartGroup, now: float) -> list[LocalReplica]:
        """Schedule the next attempt of a group, once all its replicas are down; return those that still run."""
        others = [other for other, state in group.states.items() if state is ProcessState.RUNNING]
        group.states.update(dict.fromkeys(others, ProcessState.ENDING))
        group.attempt += 1
        self._restart_if_down(group, now)
        return others

    def _was_dismissed(self, group: _RestartGroup) -> bool:
        """Return whether a part of the group, or all of it, ended with success while the leader still runs."""
        states = set(group.states.values())
        dismissed = {ProcessState.DONE} <= states <= {ProcessState.DONE, ProcessState.RUNNING}
        return self._led and self._result is None and dismissed

    def _schedule_done_groups(self, now: float) -> None:
        """Make ``recall`` restart, from ``now`` on, each group that ended with success: the next leader needs it."""
        for group in self._group_of.values():
            if all(state is ProcessState.DONE for state in group.states.values()):
                group.start_at = now

    def _restart_if_down(self, group: _RestartGroup, now: float) -> None:
        if self._result or any(state in (ProcessState.RUNNING, ProcessState.ENDING) for state in group.states.values()):
            return
        group.states.update(dict.fromkeys(group.states, ProcessState.WAITING))
        group.start_at = now + restart_delay(group.role.restart, group.failures)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndStage:
    """Replicas that are ended together; those still alive ``by_s`` seconds after the shutdown started are killed."""

    replicas: tuple[LocalReplica, ...]
    by_s: float


def end_stages(replicas: Iterable[LocalReplica], *, within_s: float = WITHIN_S) -> list[EndStage]:
    """Return the stages in which living replicas end: roles that no other depends on first, without empty stages."""
    replicas = list(replicas)
    named = frozenset().union(*(roles for roles, _ in _ORDER))
    first = EndStage(replicas=tuple(each for each in replicas if each.role not in named), by_s=_FIRST_BY * within_s)
    rest = [
        EndStage(replicas=tuple(each for each in replicas if each.role in roles), by_s=share * within_s)
        for roles, share in _ORDER
    ]
    return [stage for stage in (first, *rest) if stage.replicas]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStarted:
    """A process was started."""

    replica: LocalReplica
    attempt: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEnded:
    """A process ended; ``wanted``: because the supervisor told it to."""

    replica: LocalReplica
    attempt: int
    status: ExitStatus
    wanted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarting:
    """A replica or a gang restarts."""

    restart: Restart


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """The wanted number of replicas changed; why: the source of the request, or why more are not possible."""

    role: str
    before: int
    after: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """All processes are being ended, for this reason."""

    reason: str


Event = ProcessStarted | ProcessEnded | Restarting | Scaled | Stopping
