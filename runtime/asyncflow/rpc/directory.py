"""Soft membership: the members of a job now, kept by the process that all dial (the driver, or a queue's controller).

The registry is pure and has an injected clock: ``register``, ``heartbeat``, ``leave`` and ``sweep`` are its events;
``attach`` connects it to a server and a clock that ticks. Only a heartbeat that waits for its answer needs a running
loop. Nothing is stored: a restarted directory is empty, answers the first heartbeat of everybody with ``known=False``,
and so learns all members anew within one heartbeat. An incarnation (uuid hex) names one run of one process for ever,
and is its worker id everywhere.

Invariants: at most one incarnation of a (role, index) is a member; one that was replaced, or is of an older attempt,
never comes back (Fenced); ``on_leave`` is called once for each ``on_join``, and before the join of a replacement; who
answers no calls costs others nothing; time in which the directory itself did not run is nobody's silence.
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
    Beat,
    Beaten,
    Directives,
    Leave,
    Member,
    Registered,
    Status,
)
from asyncflow.rpc.server import RpcServer

log = logging.getLogger(__name__)

_REMEMBERED = 100_000
_PACE_S = 0.001
"""Seconds for each member of a role, between two heartbeats of one that has something to say before it is time."""


@dataclass
class _Entry:
    """A member. told: its directives, as it heard them last; parked: its heartbeat that is not answered yet."""

    member: Member
    seen: float
    status: Status = field(default_factory=dict)
    told: Directives | None = None
    parked: _Parked | None = None


class _Parked(NamedTuple):
    """A heartbeat, its answer to come, and when that comes at the latest."""

    beat: Beat
    answer: asyncio.Future[Beaten]
    expiry: asyncio.TimerHandle


class Directory:
    """Knows the members of a job.

    heartbeat_s: how often members report; lost_after_s: how long one may be silent; clock: monotonic seconds.
    on_join, on_leave: lists of functions that are called in order, at once; directives: what is wanted of a member;
    held: called with the incarnation of a subscriber and what it holds, returns what of that is unknown.

    A heartbeat is answered when there is something new, a broadcast for subscribers or by ``answer_all``, else after
    ``heartbeat_s``. It may come again after a millisecond for each member of its role, at most ``heartbeat_s``: so what
    is new reaches a small fleet, and comes from it, at once, while a large one costs no more calls than its heartbeats,
    and slows down no other.
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
        """Return the members (of ``role``), ordered by role and index."""
        return [self._entries[place].member for place in sorted(self._entries) if role in (None, place[0])]

    def peers(self) -> list[Member]:
        """Return the members that answer calls: those of whom all are told."""
        return [member for member in self.members() if member.address]

    def member(self, incarnation: str) -> Member | None:
        """Return the member that ``incarnation`` is now, if it is one."""
        place = self._places.get(incarnation)
        return None if place is None else self._entries[place].member

    def status(self, incarnation: str) -> Status:
        """Return what the member said of itself last; empty if nothing, or if it is no member."""
        place = self._places.get(incarnation)
        return {} if place is None else self._entries[place].status

    def silent_s(self, incarnation: str) -> float | None:
        """Return the seconds since the member was heard last; None if it is no member."""
        place = self._places.get(incarnation)
        return None if place is None else self._clock() - self._entries[place].seen

    def register(self, member: Member) -> Registered:
        """Take ``member`` in, in place of an earlier incarnation of its (role, index).

        Raises Fenced where it was itself replaced before, or is of an older attempt than the member in its place.
        """
        place = (member.role, member.index)
        old = self._entries.get(place)
        if member.incarnation in self._replaced or (old is not None and member.attempt < old.member.attempt):
            hint = "This process must end: another one does its work"
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

    def heartbeat(self, beat: Beat) -> Beaten | asyncio.Future[Beaten]:
        """Note that a member lives, and answer with what it does not know yet, as soon as there is something."""
        place = self._places.get(beat.incarnation)
        if place is None:
            return Beaten(known=False)
        entry = self._entries[place]
        entry.seen, entry.status = self._clock(), beat.status
        subscribes = beat.heard is not None
        unknown = self.held(beat.incarnation, beat.holds) if subscribes else ()  # which may make a broadcast
        answer = self._answer(entry, beat, unknown=unknown)
        self._release(entry)
        if answer.broadcast or answer.unknown or answer.peers is not None or answer.directives != entry.told:
            entry.told = answer.directives
            return answer
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self.heartbeat_s, self._release, entry)
        entry.parked = _Parked(beat, loop.create_future(), expiry)
        return entry.parked.answer

    def broadcast(self, document: bytes) -> None:
        """Send all subscribers a document, encoded by msgpack, in place of the one before."""
        self._broadcast = self._broadcast[0] + 1, Raw(document)
        for entry in self._entries.values():
            if entry.parked is not None and entry.parked.beat.heard is not None:
                self._release(entry)

    def answer_all(self) -> None:
        """Answer all heartbeats that wait: directives have changed, or what members say next is wanted now."""
        for entry in self._entries.values():
            self._release(entry)

    def _release(self, entry: _Entry) -> None:
        """Answer the heartbeat of a member that is parked, if there is one."""
        parked, entry.parked = entry.parked, None
        if parked is None:
            return
        parked.expiry.cancel()
        if not parked.answer.done():
            there = parked.beat.incarnation in self._places
            answer = self._answer(entry, parked.beat) if there else Beaten(known=False)
            entry.told = answer.directives
            parked.answer.set_result(answer)

    def _answer(self, entry: _Entry, beat: Beat, *, unknown: tuple[int, ...] = ()) -> Beaten:
        fresh = beat.heard is not None and beat.heard != self._broadcast[0]
        return Beaten(
            known=True,
            revision=self.revision,
            peers=None if beat.revision == self.revision else self.peers(),
            directives=self.directives(entry.member),
            broadcast=self._broadcast if fresh else None,
            unknown=unknown,
            pace_s=min(self.heartbeat_s, self._numbers[entry.member.role] * _PACE_S),
        )

    def leave(self, incarnation: str, reason: str) -> None:
        """Remove a member; nothing happens if it is none."""
        place = self._places.get(incarnation)
        if place is not None:
            self._remove(place, reason)

    def sweep(self) -> list[Member]:
        """Remove and return all who were silent for ``lost_after_s``; to be called about every ``heartbeat_s``."""
        now = self._clock()
        asleep = max(0.0, now - self._swept - 2 * self.heartbeat_s)
        self._swept = now
        if asleep:
            log.warning("the directory itself did not run for %.1f s", asleep)
            for entry in self._entries.values():
                entry.seen = min(now, entry.seen + asleep)
        lost = [place for place, entry in self._entries.items() if now - entry.seen >= self.lost_after_s]
        members = [self._entries[place].member for place in lost]
        for place in lost:
            self._remove(place, f"silent for {self.lost_after_s:g} s")
        return members

    def attach(self, server: RpcServer) -> None:
        """Serve members through ``server`` and sweep from the running loop, until ``close``."""
        server.route(REGISTER, Member, lambda member, _: self.register(member))
        server.route(HEARTBEAT, Beat, lambda beat, _: self.heartbeat(beat))
        server.route(LEAVE, Leave, lambda request, _: self.leave(request.incarnation, request.reason))
        self._swept = self._clock()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_for_ever(), name="directory sweep")

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

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s / 2)
            try:
                self.sweep()
            except Exception:
                log.exception("a hook of the directory failed")
