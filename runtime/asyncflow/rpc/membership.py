"""Membership of a process in a job: joins, reports in every heartbeat, knows its peers; and the messages for this.

The heartbeat runs in the role's event loop. A role must therefore keep its loop free: engines, trainers and other
computations run in threads (and release the GIL), or the directory removes the role after ``lost_after_s``. All times
are monotonic, so a jump of the system clock has no effect.

Invariants: a member whose directory was restarted registers again by itself. While the directory is unreachable, and
until all members have had time to register at a restarted one, the last known members stay. A member that was replaced
by a newer incarnation is ordered to stop and never registers again.
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
"""Report of a member in each heartbeat: JSON scalars, lists and dicts under names that its role chooses."""

AGE, FIGURES = "age_s", "figures"
"""Keys in the status of a role: seconds since its process started, and ``RoleMetrics.figures``."""

_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Text = Annotated[str, Meta(max_length=1024)]
_MOST_HELD = 1024


class Member(Struct, frozen=True, kw_only=True):
    """One running process of a job.

    role, index: its place; incarnation: this run of the process (uuid hex); attempt: of the role, fences older ones;
    address: where it answers calls, empty if it answers none; http: its metrics URL, empty if none; info: other facts
    that its peers need.
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
    """The version with the best evaluation. by: name of the compared figure; value: its value."""

    step: Annotated[int, Meta(ge=0)]
    by: Literal["accuracy", "greedy", "reward"]
    value: float


class Directives(Struct, frozen=True, kw_only=True):
    """Orders of the driver to a member, as a state: repeated in the answer to every heartbeat until it changes.

    stop: leave now; drain: accept no new work, return the current work, then leave; checkpoint: number of checkpoints
    requested so far (an increase requests one); judged: the step up to which every evaluation is recorded, or can no
    longer be recorded; best: the version with the best of those evaluations.
    """

    stop: bool = False
    drain: bool = False
    checkpoint: int = 0
    judged: int = -1
    best: Best | None = None


class Registered(Struct, frozen=True, kw_only=True):
    """Answer to a registration: the members that answer calls, the revision of that list, and the intervals."""

    revision: int
    peers: list[Member]
    heartbeat_s: float
    lost_after_s: float


class Heartbeat(Struct, frozen=True, kw_only=True):
    """A heartbeat: the member's incarnation, the revision of the member list that it has, and its status.

    heard: the number of the last broadcast received, None without a subscriber; holds: the holdings of the subscriber,
    as numbers that have a meaning only for the two ends.
    """

    incarnation: _Name
    revision: int
    status: Status = {}
    heard: int | None = None
    holds: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=_MOST_HELD)] = ()


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    """Answer to a heartbeat. known: False if the member must register again; peers: None if the list is unchanged.

    broadcast: number and content of the latest broadcast, None if the member has it; unknown: holdings of the member
    that it must report in full to the directory; pace_s: minimum seconds between two heartbeats of a member whose
    status changes.
    """

    known: bool
    revision: int = 0
    peers: list[Member] | None = None
    directives: Directives = Directives()
    broadcast: tuple[int, Raw] | None = None
    unknown: tuple[int, ...] = ()
    pace_s: float = 0.0


class Leave(Struct, frozen=True, kw_only=True):
    """Request of a member that leaves deliberately."""

    incarnation: _Name
    reason: _Text


log = logging.getLogger(__name__)

T = TypeVar("T")
_REGISTER_S = 5.0
_LEAVE_S = 0.5


class Subscriber(Protocol):
    """A part of a member that receives broadcasts of the directory, and reports its holdings in each heartbeat."""

    def holds(self) -> tuple[int, ...]:
        """Return the numbers of its holdings."""

    def receive(self, broadcast: Raw | None, unknown: tuple[int, ...]) -> None:
        """Process a broadcast, None if there is no new one, and the holdings to report to the directory in full."""


class Membership:
    """This process as a member of a job.

    driver: address of the directory; member: this process; credentials: of this process; status: called before each
    heartbeat, returns the report (JSON scalars, lists, dicts). on_directives: functions that are called whenever the
    directives change; subscriber: receives broadcasts from the next heartbeat on, None if there is none; registrations:
    number of registrations started by this process. If it has grown, the directory may have lost its state.
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
        self._early = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    async def join(self, timeout: float) -> None:
        """Register within ``timeout`` seconds, waiting for the directory if necessary, and start the heartbeats.

        Raises DeadlineExceeded if the directory was not reached, Fenced if a newer incarnation has this place.
        """
        await retry_within(self._register, what=f"{self.member}: joining", timeout=timeout)
        self._beating = asyncio.get_running_loop().create_task(self._send_heartbeats(), name=f"heartbeat {self.member}")

    async def close(self, reason: str = "left") -> None:
        """Stop the heartbeats, notify the directory if it responds immediately, and close ``driver``."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
            leave = Leave(incarnation=self.member.incarnation, reason=reason)
            try:
                await self.driver.call(LEAVE, leave, type(None), timeout=_LEAVE_S)
            except AsyncFlowError as error:
                log.info("%s left without notifying the directory: %s", self.member, error)
        await self.driver.close()

    def peers(self, role: str) -> tuple[Member, ...]:
        """Return the known members of ``role`` that answer calls, in order of their index.

        The returned object stays the same until the members change.
        """
        return self._by_role.get(role, ())

    def peer(self, role: str, index: int = 0) -> Member | None:
        """Return one member, or None if it is not known."""
        return self._members.get((role, index))

    def address(self, role: str, index: int = 0) -> str | None:
        """Return the address of a member, or None if it is not known: a resolver for ``RpcClient``."""
        member = self._members.get((role, index))
        return (member.address or None) if member is not None else None

    def report_soon(self) -> None:
        """Send a heartbeat early, because the status has changed."""
        self._early.set()

    async def announce(self, *, info: dict[str, Scalar], timeout: float) -> None:
        """Register again with a new ``info``."""
        member = self.member = replace(self.member, info=info)
        await retry_within(self._register, what=f"{member}: announcing itself", timeout=timeout)

    async def wait_for(self, predicate: Callable[[], T], what: str, timeout: float) -> T:
        """Wait until ``predicate()`` is true, evaluated at every change of members or directives; return its value.

        Raises DeadlineExceeded, with ``what`` in its message, and Fenced as soon as this process is replaced.
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
        self._set_members(registered.revision, registered.peers)

    async def _send_heartbeats(self) -> None:
        loop = asyncio.get_running_loop()
        while self.fenced is None:
            self._early.clear()
            sent = loop.time()
            beat, early = loop.create_task(self._try_heartbeat()), loop.create_task(self._early.wait())
            try:
                await asyncio.wait((beat, early), return_when=asyncio.FIRST_COMPLETED)
                if not early.done():
                    next_s = (beat.result() and self._pace_s) or self._heartbeat_s
                    await asyncio.wait((early,), timeout=max(0.0, sent + next_s - loop.time()))
                if early.done():
                    await asyncio.sleep(sent + self._pace_s - loop.time())
            finally:
                beat.cancel()
                early.cancel()
                await asyncio.wait((beat, early))

    async def _try_heartbeat(self) -> bool:
        """Send a heartbeat; return whether the next one, which the directory parks, may follow after ``pace_s``."""
        try:
            return await self._send_heartbeat()
        except Fenced as error:
            self._fence(error)
        except (PeerLost, DeadlineExceeded) as error:
            if self.connected:
                log.warning("%s: the directory is unreachable: %s", self.member, error)
            self.connected = False
        except Exception:
            log.exception("%s: a heartbeat failed", self.member)
        return False

    async def _send_heartbeat(self) -> bool:
        subscriber = self.subscriber
        beat = Heartbeat(
            incarnation=self.member.incarnation,
            revision=self._revision,
            status=self._status(),
            heard=None if subscriber is None else self._heard,
            holds=() if subscriber is None else subscriber.holds(),
        )
        answer = await self.driver.call(HEARTBEAT, beat, HeartbeatReply, timeout=self._heartbeat_s + self._lost_after_s)
        if not answer.known:
            log.info("%s: the directory does not know this process: registering again", self.member)
            self._known_before = self._members
            self._trusted_from = asyncio.get_running_loop().time() + self._lost_after_s
            await self._register()
            return True
        if not self.connected:
            log.info("%s: the directory is reachable again", self.member)
        self.connected = True
        self._pace_s = answer.pace_s
        if self._known_before and asyncio.get_running_loop().time() >= self._trusted_from:
            self._known_before = {}
            self._set_members(self._revision, list(self._listed.values()))
        if answer.peers is not None:
            self._set_members(answer.revision, answer.peers)
        if answer.directives != self.directives:
            self._apply(answer.directives)
        if subscriber is not None and (answer.broadcast is not None or answer.unknown):
            number, document = answer.broadcast or (self._heard, None)
            subscriber.receive(document, answer.unknown)
            self._heard = number
        return not answer.unknown

    def _fence(self, error: Fenced) -> None:
        log.error("%s must stop: %s", self.member, error)
        self.fenced = error
        self.connected = False
        self._apply(Directives(stop=True))

    def _set_members(self, revision: int, members: list[Member]) -> None:
        self._revision = revision
        self._listed = {(member.role, member.index): member for member in members}
        self._members = self._known_before | self._listed
        by_role: dict[str, list[Member]] = {}
        for place in sorted(self._members):
            by_role.setdefault(place[0], []).append(self._members[place])
        self._by_role = {role: tuple(members) for role, members in by_role.items()}
        self._wake()

    def _apply(self, directives: Directives) -> None:
        self.directives = directives
        self._wake()
        for notify in self.on_directives:
            notify(directives)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
