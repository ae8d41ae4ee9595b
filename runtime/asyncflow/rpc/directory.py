"""Soft membership: the current members of a job, kept by the driver or by a queue's controller, which all others dial.

The registry is pure and has an injected clock. Its events are ``register``, ``heartbeat``, ``leave`` and ``sweep``.
``attach`` connects it to a server and starts periodic sweeps. Only a parked heartbeat needs a running loop. Nothing is
stored: a restarted directory is empty, answers the first heartbeat of every member with ``known=False``, and so learns
all members again within one heartbeat. An incarnation (uuid hex) identifies one run of one process permanently, and is
its worker id everywhere.

Invariants: at most one incarnation of a (role, index) is a member. One that was replaced, or has an older attempt,
never returns (Fenced). ``on_leave`` is called once for each ``on_join``, and before the join of a replacement. A member
without an address costs its peers nothing. Time in which the directory itself did not run never counts as silence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Raw

from asyncflow.errors import Fenced
from asyncflow.rpc.framing import encode
from asyncflow.rpc.membership import (
    HEARTBEAT,
    LEAVE,
    REGISTER,
    Directives,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Member,
    Registered,
    Status,
)
from asyncflow.rpc.server import RpcServer

log = logging.getLogger(__name__)

_REMEMBERED = 100_000
_PACE_S = 0.001
"""Seconds per member of a role, between two early heartbeats of a member whose status changed."""


@dataclass
class _Entry:
    """A member. sent: the directives last sent to it; parked: its heartbeat that is not answered yet."""

    member: Member
    seen: float
    status: Status = field(default_factory=dict)
    sent: Directives | None = None
    parked: _Parked | None = None


class _Parked(NamedTuple):
    """A heartbeat that waits, its future answer, and the timer of the latest time of the answer."""

    beat: Heartbeat
    answer: asyncio.Future[HeartbeatReply]
    expiry: asyncio.TimerHandle


class Directory:
    """The registry of the members of a job.

    heartbeat_s: interval of the heartbeats; lost_after_s: silence after which a member is removed; clock: monotonic
    seconds. on_join, on_leave: functions that are called in order, synchronously; directives: returns the directives
    for a member; held: called with the incarnation of a subscriber and its holdings, returns the unknown holdings.

    A heartbeat is answered when there is a change, a broadcast for subscribers, or a call of ``answer_all``, otherwise
    after ``heartbeat_s``. The next one may follow after a millisecond per member of its role, at most ``heartbeat_s``.
    So the changes of a small role travel immediately; a large role makes no more calls than its regular heartbeats, and
    does not slow down other roles.
    """

    def __init__(
        self, *, heartbeat_s: float = 1.0, lost_after_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0 < heartbeat_s < lost_after_s:
            raise ValueError(f"lost_after_s ({lost_after_s}) must be longer than heartbeat_s ({heartbeat_s})")
        self.heartbeat_s = heartbeat_s
        self.lost_after_s = lost_after_s
        self.revision = 0
        self.on_join: list[Callable[[Member], None]] = []
        self.on_leave: list[Callable[[Member, str], None]] = []
        self.directives: Callable[[Member], Directives] = lambda _: Directives()
        self.held: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda _incarnation, _holds: ()
        self._broadcast = (0, Raw(encode(None)))
        self._numbers: Counter[str] = Counter()
        self._clock = clock
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._replaced: dict[str, None] = {}
        self._swept = clock()
        self._sweeper: asyncio.Task[None] | None = None

    def members(self, role: str | None = None) -> list[Member]:
        """Return the members (of ``role``, if given), ordered by role and index."""
        return [self._entries[place].member for place in sorted(self._entries) if role in (None, place[0])]

    def peers(self) -> list[Member]:
        """Return the members that answer calls: the list that all members receive."""
        return [member for member in self.members() if member.address]

    def member(self, incarnation: str) -> Member | None:
        """Return the member with this incarnation; None if there is none."""
        place = self._places.get(incarnation)
        return None if place is None else self._entries[place].member

    def status(self, incarnation: str) -> Status:
        """Return the latest status that the member reported; empty if there is none, or if it is not a member."""
        place = self._places.get(incarnation)
        return {} if place is None else self._entries[place].status

    def silent_s(self, incarnation: str) -> float | None:
        """Return the seconds since the member's last heartbeat; None if it is not a member."""
        place = self._places.get(incarnation)
        return None if place is None else self._clock() - self._entries[place].seen

    def register(self, member: Member) -> Registered:
        """Add ``member``, replacing an earlier incarnation of its (role, index).

        Raises Fenced if it was itself replaced before, or if its attempt is older than the current member's.
        """
        place = (member.role, member.index)
        old = self._entries.get(place)
        if member.incarnation in self._replaced or (old is not None and member.attempt < old.member.attempt):
            hint = "This process must end: another process has replaced it"
            raise Fenced(f"{member} was replaced by a newer incarnation", where="directory", hint=hint)
        if self._places.get(member.incarnation, place) != place:
            raise Fenced(f"incarnation {member.incarnation} is already {self.member(member.incarnation)}")
        if old is not None and old.member.incarnation == member.incarnation:
            old.seen = self._clock()
            if old.member != member:
                self.revision += bool(old.member.address or member.address)
                old.member = member
        else:
            if old is not None:
                self._replaced[old.member.incarnation] = None
                if len(self._replaced) > _REMEMBERED:
                    del self._replaced[next(iter(self._replaced))]
                self._remove(place, "replaced by a newer incarnation")
            self._entries[place] = _Entry(member, self._clock())
            self._places[member.incarnation] = place
            self._numbers[member.role] += 1
            self.revision += bool(member.address)
            log.info("%s joined (%s)", member, member.incarnation)
            for notify in self.on_join:
                notify(member)
        return Registered(
            revision=self.revision, peers=self.peers(), heartbeat_s=self.heartbeat_s, lost_after_s=self.lost_after_s
        )

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply | asyncio.Future[HeartbeatReply]:
        """Record a heartbeat, and answer with the changes that the member does not know, as soon as there are any."""
        place = self._places.get(beat.incarnation)
        if place is None:
            return HeartbeatReply(known=False)
        entry = self._entries[place]
        entry.seen, entry.status = self._clock(), beat.status
        subscribes = beat.heard is not None
        unknown = self.held(beat.incarnation, beat.holds) if subscribes else ()  # this may cause a broadcast
        answer = self._answer(entry, beat, unknown=unknown)
        self._release(entry)
        if answer.broadcast or answer.unknown or answer.peers is not None or answer.directives != entry.sent:
            entry.sent = answer.directives
            return answer
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self.heartbeat_s, self._release, entry)
        entry.parked = _Parked(beat, loop.create_future(), expiry)
        return entry.parked.answer

    def broadcast(self, document: bytes) -> None:
        """Send all subscribers a document, encoded by msgpack, which replaces the previous one."""
        self._broadcast = self._broadcast[0] + 1, Raw(document)
        for entry in self._entries.values():
            if entry.parked is not None and entry.parked.beat.heard is not None:
                self._release(entry)

    def answer_all(self) -> None:
        """Answer all parked heartbeats, because directives changed or fresh reports of the members are needed."""
        for entry in self._entries.values():
            self._release(entry)

    def _release(self, entry: _Entry) -> None:
        """Answer the parked heartbeat of a member, if there is one."""
        parked, entry.parked = entry.parked, None
        if parked is None:
            return
        parked.expiry.cancel()
        if not parked.answer.done():
            is_member = parked.beat.incarnation in self._places
            answer = self._answer(entry, parked.beat) if is_member else HeartbeatReply(known=False)
            entry.sent = answer.directives
            parked.answer.set_result(answer)

    def _answer(self, entry: _Entry, beat: Heartbeat, *, unknown: tuple[int, ...] = ()) -> HeartbeatReply:
        fresh = beat.heard is not None and beat.heard != self._broadcast[0]
        return HeartbeatReply(
            known=True,
            revision=self.revision,
            peers=None if beat.revision == self.revision else self.peers(),
            directives=self.directives(entry.member),
            broadcast=self._broadcast if fresh else None,
            unknown=unknown,
            pace_s=min(self.heartbeat_s, self._numbers[entry.member.role] * _PACE_S),
        )

    def leave(self, incarnation: str, reason: str) -> None:
        """Remove a member; do nothing if it is not a member."""
        place = self._places.get(incarnation)
        if place is not None:
            self._remove(place, reason)

    def sweep(self) -> list[Member]:
        """Remove and return all members silent for ``lost_after_s``. Call it about every ``heartbeat_s``."""
        now = self._clock()
        paused_s = max(0.0, now - self._swept - 2 * self.heartbeat_s)
        self._swept = now
        if paused_s:
            log.warning("the directory itself did not run for %.1f s", paused_s)
            for entry in self._entries.values():
                entry.seen = min(now, entry.seen + paused_s)
        lost = [place for place, entry in self._entries.items() if now - entry.seen >= self.lost_after_s]
        members = [self._entries[place].member for place in lost]
        for place in lost:
            self._remove(place, f"silent for {self.lost_after_s:g} s")
        return members

    def attach(self, server: RpcServer) -> None:
        """Serve members through ``server`` and sweep in the running loop, until ``close``."""
        server.route(REGISTER, Member, lambda member, _: self.register(member))
        server.route(HEARTBEAT, Heartbeat, lambda beat, _: self.heartbeat(beat))
        server.route(LEAVE, Leave, lambda request, _: self.leave(request.incarnation, request.reason))
        self._swept = self._clock()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_periodically(), name="directory sweep")

    async def close(self) -> None:
        """Stop sweeping."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])

    def _remove(self, place: tuple[str, int], reason: str) -> None:
        entry = self._entries.pop(place)
        member = entry.member
        del self._places[member.incarnation]
        self._numbers[member.role] -= 1
        self._release(entry)
        self.revision += bool(member.address)
        log.info("%s left (%s): %s", member, member.incarnation, reason)
        for notify in self.on_leave:
            notify(member, reason)

    async def _sweep_periodically(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s / 2)
            try:
                self.sweep()
            except Exception:
                log.exception("a hook of the directory failed")
