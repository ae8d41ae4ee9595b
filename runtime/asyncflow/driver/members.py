"""The members of the job as the driver sees them: who is there, how busy they are, and what is wanted of them.

Invariant: directives are levels, so a member that missed one heartbeat misses nothing; a rollout, or a process of
another task, that is gone loses its leases at once, and what it had produced until then stays counted, by the next
driver too; a member is known to have lived, and to have worked, up to its last heartbeat and no further. Followers are
told what all are told, and nothing waits for one of them.
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
from asyncflow.driver.instances import Heard, fleets, heard_of, rollout_state, task_states, versions_state
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
"""Roles that are dismissed last, because the others hand back to them, and those that they in turn rely on."""
_WITHOUT_LEASES = frozenset(("trainer", "controller", "storage", "holder", "master", FOLLOWER))
HEARTBEAT_POLL_S = 0.05
_TOLD = ("tokens_generated_eval", "swap_stall_s", "delivered", "slots")
"""Figures of a rollout that are no metrics of it."""


class Members:
    """Watches a directory.

    lives: what is known of them, and was by earlier drivers, from ``memory``, a file. swap_at: when rollouts do.
    started: when this driver was, by ``clock.now``. changed: called whenever a member came or went. figures: the
    metrics that the driver reports of itself.
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
        self._dismissed = -1  # the turn up to which all are to stop
        self._somebody_left = asyncio.Event()
        self._expiring: set[asyncio.Task[None]] = set()
        directory.on_join.append(self._joined)
        directory.on_leave.append(self._left)
        directory.directives = self._directives

    @property
    def kept_best(self) -> Best | None:
        """The version whose checkpoint the trainer keeps as the best."""
        told = self._leader.get("best")
        return None if told is None else msgspec.convert(told, Best)

    @property
    def exports(self) -> dict[str, int]:
        """The steps of the weights that the trainer has exported, by folder."""
        return msgspec.convert(self._leader.get("exports") or {}, dict[str, int])

    @property
    def exported(self) -> bool:
        """True once the trainer has made the last step and written what the run is to leave behind."""
        return bool(self._leader.get("exported"))

    @property
    def counts(self) -> Counter[str]:
        """Number of members of each role, 0 where all have left."""
        there = Counter(member.role for member in self._directory.members())
        return Counter({role: there[role] for role in self._roles | there.keys()})

    def versions(self, *, nbytes: int | None, newest: int | None) -> VersionsState:
        """Return how versions reach those that load them. nbytes, newest: size and step of the newest version."""
        return versions_state(heard_of(self._directory), nbytes=nbytes, newest=newest, swap_at=self._swap_at)

    def fleets(self, *, nbytes: int | None, newest: int | None) -> dict[str, VersionsState]:
        """Return how versions reach the followers of one WeightSync alone, by its name."""
        return fleets(heard_of(self._directory), nbytes=nbytes, newest=newest)

    def statuses(self, role: str) -> list[Status]:
        """Return what the members of a role reported in their last heartbeats."""
        return [status for _, status, _ in heard_of(self._directory, role)]

    def sample_rates(self) -> dict[str, float]:
        """Return the samples a second that each rollout has made so far while it generated, by its worker id."""
        return {
            member.incarnation: int(status.get("delivered", 0)) / float(status["busy_s"])
            for member, status, _ in heard_of(self._directory, "rollout")
            if float(status.get("busy_s", 0.0)) > 0
        }

    def rollouts(self, *, newest: int | None, lag: int) -> list[RolloutState]:
        """Return the state of each rollout; newest: step of the newest version; lag: how far behind is allowed."""
        return [rollout_state(each, newest=newest, lag=lag) for each in heard_of(self._directory, "rollout")]

    def tasks(self, graph: JobGraph, stats: QueueStats | None) -> dict[str, TaskState]:
        """Return the state of each task that is a role of its own; stats: of the queue."""
        return task_states(graph, heard_of(self._directory), stats)

    @property
    def _leader(self) -> Status:
        """The status of rank 0 of the trainer, empty while it is not there."""
        return next((status for member, status, _ in heard_of(self._directory, "trainer") if member.index == 0), {})

    @property
    def _own(self) -> list[Heard]:
        """The members that are a part of the job, as they were heard last: nothing waits for followers."""
        return [each for each in heard_of(self._directory) if each[0].role != FOLLOWER]

    async def gather(self, needed: Counter[str], *, changed: Callable[[], Awaitable[None]], within_s: float) -> None:
        """Wait until so many of each role are there. Raises DeadlineExceeded."""
        deadline = time.monotonic() + within_s
        while not needed <= self.counts:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{', '.join(sorted(needed))} did not join within {within_s:g} s",
                    where="driver",
                    hint="Their logs say why.",
                )
            await changed()

    async def await_heartbeats(self, *, within_s: float) -> None:
        """Wait until everybody who is there has sent another heartbeat, at most ``within_s`` seconds."""
        asked = time.monotonic()
        self._directory.answer_all()
        while (waited := time.monotonic() - asked) < within_s:
            if max((silent_s for _, _, silent_s in self._own), default=0.0) < waited:
                return
            await asyncio.sleep(HEARTBEAT_POLL_S)

    def save(self, now: float) -> None:
        """Observe, and write down for the next driver what is known."""
        self.observe(now)
        self._memory.write(self.lives.dump())

    def observe(self, now: float) -> None:
        """Record what members reported in their last heartbeats, and that this driver lives; now: ``clock.now()``."""
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
                figures={**status.get(FIGURES, {}), **{each: status[each] for each in _TOLD if each in status}},
            )

    def present(self) -> list[MemberState]:
        """Return how each member of the job does."""
        return [member_state(member, status, silent_s=silent_s) for member, status, silent_s in self._own]

    def drain(self, worker: str) -> None:
        """Tell a rollout to give back its work and leave. Raises StaleHandle for an unknown one."""
        member = self._directory.member(worker)
        if member is None or member.role != "rollout":
            raise StaleHandle(f"no rollout {worker}", where="drain", hint="GET /v1/status lists them.")
        self._drained.add(worker)
        self._directory.answer_all()

    def ask_for_checkpoint(self) -> None:
        """Direct the trainer to write a checkpoint at the next step boundary."""
        self._checkpoints_asked += 1
        self._directory.answer_all()

    async def dismiss(self, *, within_s: float) -> None:
        """Direct all members to stop, and wait until the job's own have left, at most ``within_s`` seconds."""
        self._dismiss(turn=0)
        try:
            async with asyncio.timeout(within_s):
                while own := self._own:
                    self._somebody_left.clear()
                    if (turn := min(_turn(member) for member, _, _ in own)) > self._dismissed:
                        self._dismiss(turn=turn)
                    await self._somebody_left.wait()
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
        self._somebody_left.set()
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
            log.warning("the leases of %s end by themselves: %s", member, error)


def _turn(member: Member) -> int:
    """Return when a member is dismissed: after all who are of a lower turn have left."""
    return next((1 + turn for turn, roles in enumerate(LAST) if member.role in roles), 0)
