"""A role's own end of the directory: joins, reports in every heartbeat, knows the others; and the messages for it.

The heartbeat runs in the role's event loop. A role must therefore keep its loop free: engines, trainers and whatever
else computes run in threads (and let go of the GIL), or the directory takes the role for lost after ``lost_after_s``.
All times are monotonic: a system clock that jumps changes nothing.

Invariants: a member whose directory was restarted registers again by itself; while the directory is away, and as long
as a restarted one may not have heard of everybody, the last known members stay; one that was replaced by a newer
incarnation is told to stop and never registers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar

from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, PeerLost
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import retry_within
from asyncflow.rpc.tls import Credentials

REGISTER = "directory.register"
HEARTBEAT = "directory.heartbeat"
LEAVE = "directory.leave"

Scalar: TypeAlias = str | int | float | bool
Status: TypeAlias = dict[str, Any]
"""What a member says of itself in each heartbeat: JSON scalars, lists and dicts under names of its role's choice."""

AGE, FIGURES = "age_s", "figures"
"""In the status of a role: seconds since its process began, and ``RoleMetrics.figures``."""

_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Text = Annotated[str, Meta(max_length=1024)]
_MOST_HELD = 1024


class Member(Struct, frozen=True, kw_only=True):
    """One running process of a job.

    role, index: its place; incarnation: this run of it (uuid hex); attempt: of the role, fences older ones;
    address: where its calls are answered, empty if nowhere; http: its metrics URL, empty if none; info: what else
    others must know of it.
    """

    role: _Name
    index: Annotated[int, Meta(ge=0)]
    incarnation: _Name
    attempt: Annotated[int, Meta(ge=0)] = 0
    address: _Text = ""
    http: _Text = ""
    info: Annotated[dict[str, Scalar], Meta(max_length=256)] = {}

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class Best(Struct, frozen=True, kw_only=True):
    """The version with the best evaluation. by: name of the figure that is compared; value: what it was."""

    step: Annotated[int, Meta(ge=0)]
    by: Literal["accuracy", "greedy", "reward"]
    value: float


class Directives(Struct, frozen=True, kw_only=True):
    """Requests of the driver to a member, as a level: in the answer to every heartbeat until it changes.

    stop: leave now; drain: take nothing new, hand back, then leave; checkpoint: number of checkpoints asked for so far
    (a larger number than before means: write one); judged: the step up to which every evaluation is recorded, or can
    not be any more; best: the version whose evaluation was the best of those.
    """

    stop: bool = False
    drain: bool = False
    checkpoint: int = 0
    judged: int = -1
    best: Best | None = None


class Registered(Struct, frozen=True, kw_only=True):
    """Answer to a registration: the members now that answer calls, the revision of that list, and the rhythm."""

    revision: int
    peers: list[Member]
    heartbeat_s: float
    lost_after_s: float


class Beat(Struct, frozen=True, kw_only=True):
    """A heartbeat: who, which revision of the members it knows, and how it does.

    heard: the number of the broadcast that it knows, None from who wants none; holds: what a subscriber has, as numbers
    that mean something to the two subscribers only.
    """

    incarnation: _Name
    revision: int
    status: Status = {}
    heard: int | None = None
    holds: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=_MOST_HELD)] = ()


class Beaten(Struct, frozen=True, kw_only=True):
    """Answer to a heartbeat. known: False asks the member to register again; peers: None where nothing changed.

    broadcast: what all subscribers are told, and its number, None where nothing changed; unknown: of what the member
    holds, that of which the directory must be told more; pace_s: seconds between two heartbeats of a member that has
    something to say before it is time.
    """

    known: bool
    revision: int = 0
    peers: list[Member] | None = None
    directives: Directives = Directives()
    broadcast: tuple[int, Raw] | None = None
    unknown: tuple[int, ...] = ()
    pace_s: float = 0.0


class Leave(Struct, frozen=True, kw_only=True):
    """A member goes on purpose."""

    incarnation: _Name
    reason: _Text


log = logging.getLogger(__name__)

T = TypeVar("T")
_REGISTER_S = 5.0
_LEAVE_S = 0.5


class Subscriber(Protocol):
    """A part of a member that hears what the directory tells all, and says in each heartbeat what it has."""

    def holds(self) -> tuple[int, ...]:
        """Return the numbers of what it has."""

    def hear(self, broadcast: Raw | None, unknown: tuple[int, ...]) -> None:
        """Take a broadcast, where there is a new one, and what of its own must be told the directory in full."""


class Membership:
    """This process as a member of a job.

    driver: address of the directory; member: who this process is; credentials: of this process; status: asked before
    each heartbeat for what to report (JSON scalars, lists, dicts). on_directives: functions that are called whenever
    the directives change; subscriber: hears broadcasts from the next heartbeat on, None for nobody; registrations: how
    often this process has begun to register: where that has grown, the directory may have forgotten it.
    """

    def __init__(
        self,
        *,
        driver: str,
        member: Member,
        credentials: Credentials | None = None,
        status: Callable[[], Status] = dict,
    ) -> None:
        self.member = member
        self.driver = RpcClient(
            name=str(member), resolve=driver, credentials=credentials, expects=("driver", "controller", "publisher")
        )
        self.directives = Directives()
        self.connected = False
        self.fenced: Fenced | None = None
        self.on_directives: list[Callable[[Directives], None]] = []
        self.subscriber: Subscriber | None = None
        self.registrations = 0
        self._pace_s = 0.0
        self._status = status
        self._members: dict[tuple[str, int], Member] = {}
        self._known_before: dict[tuple[str, int], Member] = {}
        self._listed: dict[tuple[str, int], Member] = {}
        self._by_role: dict[str, tuple[Member, ...]] = {}
        self._trusted_from = 0.0
        self._revision = self._heard = -1
        self._heartbeat_s = 1.0
        self._lost_after_s = 5.0
        self._changed = asyncio.Event()
        self._soon = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    async def join(self, timeout: float) -> None:
        """Register, however late the directory comes up within ``timeout`` seconds, and begin to report.

        Raises DeadlineExceeded when the directory was not reached, Fenced when a newer incarnation has this place.
        """
        await retry_within(self._register, what=f"{self.member}: joining", timeout=timeout)
        self._beating = asyncio.get_running_loop().create_task(self._beat_for_ever(), name=f"heartbeat {self.member}")

    async def close(self, reason: str = "left") -> None:
        """Stop reporting, tell the directory if it can be reached at once, and close ``driver``."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
            leave = Leave(incarnation=self.member.incarnation, reason=reason)
            try:
                await self.driver.call(LEAVE, leave, type(None), timeout=_LEAVE_S)
            except AsyncFlowError as error:
                log.info("%s left without telling the directory: %s", self.member, error)
        await self.driver.close()

    def peers(self, role: str) -> tuple[Member, ...]:
        """Return the members of ``role`` that answer calls, as far as known now, in order of their index.

        It is the same object until the members change.
        """
        return self._by_role.get(role, ())

    def peer(self, role: str, index: int = 0) -> Member | None:
        """Return one member, or None while there is none."""
        return self._members.get((role, index))

    def address(self, role: str, index: int = 0) -> str | None:
        """Return where a member answers calls, or None while there is none: a resolver for ``RpcClient``."""
        member = self._members.get((role, index))
        return (member.address or None) if member is not None else None

    def nudge(self) -> None:
        """Report now instead of at the next heartbeat: the status has changed."""
        self._soon.set()

    async def announce(self, *, info: dict[str, Scalar], timeout: float) -> None:
        """Register again with another ``info``."""
        member = self.member = replace(self.member, info=info)
        await retry_within(self._register, what=f"{member}: announcing itself", timeout=timeout)

    async def wait_for(self, predicate: Callable[[], T], what: str, timeout: float) -> T:
        """Wait until ``predicate()``, asked at every change of members or directives, gives something true; give that.

        Raises DeadlineExceeded that says ``what`` was waited for, and Fenced as soon as this process was replaced.
        """
        try:
            async with asyncio.timeout(timeout):
                while not (found := predicate()):
                    if self.fenced is not None:
                        raise self.fenced
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what} did not come within {timeout:g} s",
                where=str(self.member),
                hint=f"Members known: {', '.join(str(m) for m in self._members.values()) or 'none'}",
            ) from None
        return found

    async def _register(self, within_s: float = _REGISTER_S) -> None:
        self._revision = self._heard = -1
        self.registrations += 1
        registered = await self.driver.call(REGISTER, self.member, Registered, timeout=min(within_s, _REGISTER_S))
        self._heartbeat_s, self._lost_after_s = registered.heartbeat_s, registered.lost_after_s
        self.connected = True
        self._learn(registered.revision, registered.peers)

    async def _beat_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while self.fenced is None:
            self._soon.clear()
            sent = loop.time()
            beat, soon = loop.create_task(self._try_to_beat()), loop.create_task(self._soon.wait())
            try:
                await asyncio.wait((beat, soon), return_when=asyncio.FIRST_COMPLETED)
                if not soon.done():
                    next_s = (beat.result() and self._pace_s) or self._heartbeat_s
                    await asyncio.wait((soon,), timeout=max(0.0, sent + next_s - loop.time()))
                if soon.done():
                    await asyncio.sleep(sent + self._pace_s - loop.time())
            finally:
                beat.cancel()
                soon.cancel()
                await asyncio.wait((beat, soon))

    async def _try_to_beat(self) -> bool:
        """Report once; return whether the next heartbeat, which waits for changes there, may follow at its pace."""
        try:
            return await self._beat()
        except Fenced as error:
            self._be_fenced(error)
        except (PeerLost, DeadlineExceeded) as error:
            if self.connected:
                log.warning("%s: the directory is away: %s", self.member, error)
            self.connected = False
        except Exception:
            log.exception("%s: a heartbeat failed", self.member)
        return False

    async def _beat(self) -> bool:
        subscriber = self.subscriber
        beat = Beat(
            incarnation=self.member.incarnation,
            revision=self._revision,
            status=self._status(),
            heard=None if subscriber is None else self._heard,
            holds=() if subscriber is None else subscriber.holds(),
        )
        answer = await self.driver.call(HEARTBEAT, beat, Beaten, timeout=self._heartbeat_s + self._lost_after_s)
        if not answer.known:
            log.info("%s: the directory does not know this process: registering again", self.member)
            self._known_before = self._members
            self._trusted_from = asyncio.get_running_loop().time() + self._lost_after_s
            await self._register()
            return True
        if not self.connected:
            log.info("%s: the directory is back", self.member)
        self.connected = True
        self._pace_s = answer.pace_s
        if self._known_before and asyncio.get_running_loop().time() >= self._trusted_from:
            self._known_before = {}
            self._learn(self._revision, list(self._listed.values()))
        if answer.peers is not None:
            self._learn(answer.revision, answer.peers)
        if answer.directives != self.directives:
            self._obey(answer.directives)
        if subscriber is not None and (answer.broadcast is not None or answer.unknown):
            number, told = answer.broadcast or (self._heard, None)
            subscriber.hear(told, answer.unknown)
            self._heard = number
        return not answer.unknown

    def _be_fenced(self, error: Fenced) -> None:
        log.error("%s must stop: %s", self.member, error)
        self.fenced = error
        self.connected = False
        self._obey(Directives(stop=True))

    def _learn(self, revision: int, members: list[Member]) -> None:
        self._revision = revision
        self._listed = {(member.role, member.index): member for member in members}
        self._members = self._known_before | self._listed
        by_role: dict[str, list[Member]] = {}
        for place in sorted(self._members):
            by_role.setdefault(place[0], []).append(self._members[place])
        self._by_role = {role: tuple(members) for role, members in by_role.items()}
        self._wake()

    def _obey(self, directives: Directives) -> None:
        self.directives = directives
        self._wake()
        for notify in self.on_directives:
            notify(directives)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
