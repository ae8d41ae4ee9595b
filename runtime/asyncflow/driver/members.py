"""The members of the job as the driver sees them: who is there, how busy they are, and what is wanted of them.

Invariant: directives are levels, so a member that missed one heartbeat misses nothing; a rollout that is gone loses its
leases at once, and what it had produced until then stays counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from asyncflow.api.status import RolloutState
from asyncflow.driver.lives import Lives
from asyncflow.driver.status import rollout_state
from asyncflow.errors import AsyncFlowError, StaleHandle
from asyncflow.net.directory import Directives, Directory, Member
from asyncflow.queue.client import QueueClient
from asyncflow.weights.service import CatalogueService

log = logging.getLogger(__name__)

EXPIRE_S = 10.0


class Members:
    """Watches a directory. changed: told whenever somebody came or went."""

    def __init__(
        self,
        directory: Directory,
        *,
        queue: QueueClient,
        weights: CatalogueService,
        lives: Lives,
        changed: Callable[[], None],
    ) -> None:
        self.trainer_attempt = 0
        self.lives = lives
        self._directory = directory
        self._queue = queue
        self._weights = weights
        self._changed = changed
        self._tokens: dict[str, int] = {}
        self._drained: set[str] = set()
        self._checkpoints_asked = 0
        self._stopping = False
        self._goodbyes: set[asyncio.Task[None]] = set()
        directory.on_join.append(self._joined)
        directory.on_leave.append(self._left)
        directory.directives = self._directives

    @property
    def tokens_generated(self) -> int:
        """Response tokens that all rollouts have generated, those that are gone included."""
        return sum(self._tokens.values())

    @property
    def counts(self) -> Counter[str]:
        """How many there are of each role."""
        return Counter(member.role for member in self._directory.members())

    def rollouts(self, *, newest: int | None, lag: int) -> list[RolloutState]:
        """Give the state of each rollout; newest: step of the newest version; lag: how far behind is allowed."""
        return [
            rollout_state(member, self._directory.status(member.incarnation), newest=newest, lag=lag)
            for member in self._directory.members("rollout")
        ]

    def observe(self, now: float) -> None:
        """Take in what members said in their last heartbeats."""
        for member in self._directory.members():
            status = self._directory.status(member.incarnation)
            if "busy_s" in status:
                self.lives.observe(
                    member.incarnation,
                    role=member.role,
                    started=float(member.info.get("started", now)),
                    busy_s=float(status["busy_s"]),
                    now=now,
                )
            if "tokens_generated" in status:
                self._tokens[member.incarnation] = int(status["tokens_generated"])

    def drain(self, worker: str) -> None:
        """Let a rollout hand back its work and leave. Raises StaleHandle for an unknown one."""
        member = self._directory.member(worker)
        if member is None or member.role != "rollout":
            raise StaleHandle(f"no rollout {worker}", where="drain", hint="GET /v1/status lists them.")
        self._drained.add(worker)

    def ask_for_checkpoint(self) -> None:
        """Have the trainer write one at the next step boundary."""
        self._checkpoints_asked += 1

    async def dismiss(self, *, within_s: float) -> None:
        """Tell everybody to stop, and wait until they have left, at most ``within_s`` seconds."""
        self._stopping = True
        deadline = time.monotonic() + within_s
        while self._directory.members() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    def _directives(self, member: Member) -> Directives:
        return Directives(
            stop=self._stopping, drain=member.incarnation in self._drained, checkpoint=self._checkpoints_asked
        )

    def _joined(self, member: Member) -> None:
        if member.role == "trainer":
            self.trainer_attempt = max(self.trainer_attempt, member.attempt)
            self._weights.fence(member.attempt)
        self._changed()

    def _left(self, member: Member, _reason: str) -> None:
        self._weights.leave(member.incarnation)
        self._drained.discard(member.incarnation)
        if member.role == "rollout" and not self._stopping:
            goodbye = asyncio.get_running_loop().create_task(self._expire(member), name=f"expire {member}")
            self._goodbyes.add(goodbye)
            goodbye.add_done_callback(self._goodbyes.discard)
        self._changed()

    async def _expire(self, member: Member) -> None:
        try:
            await self._queue.expire(worker=member.incarnation, timeout=EXPIRE_S)
        except AsyncFlowError as error:
            log.warning("the leases of %s end by themselves: %s", member, error)
