"""The members of the job as the driver sees them: their presence, their reported work, and directives to them.

Invariants: directives are levels, so a member that missed a heartbeat misses no directive; when a rollout or a process
of another task leaves, its leases expire immediately, and its output up to then stays counted, also by the next driver;
the lifetime and work of a member are counted up to its last heartbeat only; followers receive the same directives as
all members, but the driver never waits for a follower.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from asyncflow.api.graph import JobGraph
from asyncflow.api.names import FOLLOWER, HANDED_ON
from asyncflow.api.status import RolloutState, TaskState
from asyncflow.api.versions import VersionsState
from asyncflow.driver.instances import (
    LastHeartbeat,
    fleets,
    last_heartbeats,
    rollout_state,
    task_states,
    versions_state,
)
from asyncflow.driver.journal import StateFile
from asyncflow.driver.lives import Life, Lives
from asyncflow.driver.presence import MemberState, member_state
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, StaleHandle
from asyncflow.flow.instance import SwapAt
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import AGE, FIGURES, Best, Directives, Member, Status
from asyncflow.weights.service import CatalogueService

log = logging.getLogger(__name__)

EXPIRE_S = 10.0
LAST = (frozenset(("controller", "storage")), frozenset(("holder", "master")))
"""Roles that are dismissed last, in this order: the queue, to which other roles return work, and its backends."""
_WITHOUT_LEASES = frozenset(("trainer", "controller", "storage", "holder", "master", FOLLOWER))
HEARTBEAT_POLL_S = 0.05
_OTHER_FIGURES = ("tokens_generated_eval", "swap_stall_s", "delivered", "slots")
"""Entries of a rollout's status that count as figures of its life in addition to its metrics."""


class Members:
    """Watches the members in a directory.

    lives: lifetimes and work of the members, restored from the file ``memory`` of earlier drivers. swap_at: when
    rollouts swap. started: start of this driver, by ``clock.now``. changed: called when a member joins or leaves.
    figures: returns the metrics of the driver itself.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        queue: QueueClient,
        weights: CatalogueService,
        lives: Lives,
        swap_at: SwapAt,
        memory: Path,
        started: float,
        changed: Callable[[], None],
        figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.trainer_attempt = 0
        self._figures = figures
        self.lives = lives
        self._swap_at = swap_at
        self._memory = StateFile(memory)
        self.lives.restore(self._memory.read(dict[str, Life]) or {})
        self._started = started
        self._directory = directory
        self._queue = queue
        self._weights = weights
        self._changed = changed
        self._roles: set[str] = set()
        self._drained: set[str] = set()
        self._checkpoints_asked = 0
        self.judged = -1
        self.best: Best | None = None
        self._dismissed = -1  # the turn up to which all members are directed to stop
        self._member_left = asyncio.Event()
        self._expiring: set[asyncio.Task[None]] = set()
        directory.on_join.append(self._joined)
        directory.on_leave.append(self._left)
        directory.directives = self._directives

    @property
    def kept_best(self) -> Best | None:
        """The version whose checkpoint the trainer keeps as the best."""
        best = self._leader.get("best")
        return None if best is None else msgspec.convert(best, Best)

    @property
    def exports(self) -> dict[str, int]:
        """The steps of the weights that the trainer has exported, by folder."""
        return msgspec.convert(self._leader.get("exports") or {}, dict[str, int])

    @property
    def exported(self) -> bool:
        """True once the trainer has made the last step and written its exports."""
        return bool(self._leader.get("exported"))

    @property
    def counts(self) -> Counter[str]:
        """Number of members of each role, 0 if all have left."""
        present = Counter(member.role for member in self._directory.members())
        return Counter({role: present[role] for role in self._roles | present.keys()})

    def versions(self, *, nbytes: int | None, newest: int | None) -> VersionsState:
        """Return the distribution of versions to all instances. nbytes, newest: size and step of the newest version."""
        return versions_state(last_heartbeats(self._directory), nbytes=nbytes, newest=newest, swap_at=self._swap_at)

    def fleets(self, *, nbytes: int | None, newest: int | None) -> dict[str, VersionsState]:
        """Return the distribution of versions to the followers of each WeightSync, by its name."""
        return fleets(last_heartbeats(self._directory), nbytes=nbytes, newest=newest)

    def statuses(self, role: str) -> list[Status]:
        """Return the statuses in the last heartbeats of the members of a role."""
        return [status for _, status, _ in last_heartbeats(self._directory, role)]

    def sample_rates(self) -> dict[str, float]:
        """Return the samples per second of each rollout while it generated, since its start, by its worker id."""
        return {
            member.incarnation: int(status.get("delivered", 0)) / float(status["busy_s"])
            for member, status, _ in last_heartbeats(self._directory, "rollout")
            if float(status.get("busy_s", 0.0)) > 0
        }

    def rollouts(self, *, newest: int | None, lag: int) -> list[RolloutState]:
        """Return the state of each rollout; newest: step of the newest version; lag: allowed lag of the schedule."""
        return [rollout_state(each, newest=newest, lag=lag) for each in last_heartbeats(self._directory, "rollout")]

    def tasks(self, graph: JobGraph, stats: QueueStats | None) -> dict[str, TaskState]:
        """Return the state of each task that is a role of its own; stats: statistics of the queue."""
        return task_states(graph, last_heartbeats(self._directory), stats)

    @property
    def _leader(self) -> Status:
        """The status of rank 0 of the trainer, empty while there is none."""
        return next(
            (status for member, status, _ in last_heartbeats(self._directory, "trainer") if member.index == 0), {}
        )

    @property
    def _own(self) -> list[LastHeartbeat]:
        """The last heartbeats of the job's own members, without followers."""
        return [each for each in last_heartbeats(self._directory) if each[0].role != FOLLOWER]

    async def gather(self, needed: Counter[str], *, changed: Callable[[], Awaitable[None]], within_s: float) -> None:
        """Wait until the needed number of members of each role have joined. Raises DeadlineExceeded."""
        deadline = time.monotonic() + within_s
        while not needed <= self.counts:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{', '.join(sorted(needed))} did not join within {within_s:g} s",
                    where="driver",
                    hint="See their logs",
                )
            await changed()

    async def await_heartbeats(self, *, within_s: float) -> None:
        """Wait until each of the job's members has sent another heartbeat, at most ``within_s`` seconds."""
        start = time.monotonic()
        self._directory.answer_all()
        while (waited := time.monotonic() - start) < within_s:
            if max((silent_s for _, _, silent_s in self._own), default=0.0) < waited:
                return
            await asyncio.sleep(HEARTBEAT_POLL_S)

    def save(self, now: float) -> None:
        """Observe the members, and write their lives to the file for the next driver."""
        self.observe(now)
        self._memory.write(self.lives.dump())

    def observe(self, now: float) -> None:
        """Record the last heartbeats of the members, and that this driver lives; now: ``clock.now()``."""
        self.lives.observe(
            f"driver {self._started}", role="driver", started=self._started, now=now, figures=self._figures()
        )
        for member, status, silent_s in self._own:
            seen = now - silent_s
            self.lives.observe(
                member.incarnation,
                role=member.role,
                started=seen - float(status.get(AGE, 0.0)),
                now=seen,
                busy_s=float(status["busy_s"]) if "busy_s" in status else None,
                held_s=float(status["held_s"]) if int(status.get("version", -1)) >= 0 else None,
                tokens=int(status.get("tokens_generated", 0)),
                figures={
                    **status.get(FIGURES, {}),
                    **{each: status[each] for each in _OTHER_FIGURES if each in status},
                },
            )

    def present(self) -> list[MemberState]:
        """Return the state of each of the job's members."""
        return [member_state(member, status, silent_s=silent_s) for member, status, silent_s in self._own]

    def drain(self, worker: str) -> None:
        """Direct a rollout to return its work and leave. Raises StaleHandle for an unknown one."""
        member = self._directory.member(worker)
        if member is None or member.role != "rollout":
            raise StaleHandle(f"no rollout {worker}", where="drain", hint="GET /v1/status lists them")
        self._drained.add(worker)
        self._directory.answer_all()

    def ask_for_checkpoint(self) -> None:
        """Direct the trainer to write a checkpoint at the next step boundary."""
        self._checkpoints_asked += 1
        self._directory.answer_all()

    async def dismiss(self, *, within_s: float) -> None:
        """Direct all members to stop, and wait until the job's members have left, at most ``within_s`` seconds."""
        self._dismiss(turn=0)
        try:
            async with asyncio.timeout(within_s):
                while own := self._own:
                    self._member_left.clear()
                    if (turn := min(_turn(member) for member, _, _ in own)) > self._dismissed:
                        self._dismiss(turn=turn)
                    await self._member_left.wait()
        except TimeoutError:
            rest = ", ".join(str(member) for member, _, _ in self._own)
            log.warning("these members have not left within %g s: %s", within_s, rest)

    def _dismiss(self, *, turn: int) -> None:
        self._dismissed = turn
        self._directory.answer_all()

    def _directives(self, member: Member) -> Directives:
        return Directives(
            stop=_turn(member) <= self._dismissed,
            drain=member.incarnation in self._drained,
            checkpoint=self._checkpoints_asked,
            judged=self.judged,
            best=self.best,
        )

    def _joined(self, member: Member) -> None:
        self._roles.add(member.role)
        if member.role == "trainer":
            self.trainer_attempt = max(self.trainer_attempt, member.attempt)
            self._weights.catalogue.fence(member.attempt)
        self._changed()

    def _left(self, member: Member, reason: str) -> None:
        if reason == HANDED_ON:
            self.lives.leave(member.incarnation)
        self._member_left.set()
        self._drained.discard(member.incarnation)
        if member.role not in _WITHOUT_LEASES and self._dismissed < 0:
            expiring = asyncio.get_running_loop().create_task(self._expire(member), name=f"expire {member}")
            self._expiring.add(expiring)
            expiring.add_done_callback(self._expiring.discard)
        self._changed()

    async def _expire(self, member: Member) -> None:
        try:
            await self._queue.expire(worker=member.incarnation, timeout=EXPIRE_S)
        except AsyncFlowError as error:
            log.warning("the leases of %s were not expired, they end at their deadlines: %s", member, error)


def _turn(member: Member) -> int:
    """Return the turn of a member: it is dismissed after all members of lower turns have left."""
    return next((1 + turn for turn, roles in enumerate(LAST) if member.role in roles), 0)
