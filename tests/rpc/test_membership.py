"""Members and directories over real sockets, killed and stopped by real signals."""

import asyncio
import contextlib
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from deadlines import ends_late

from asyncflow.errors import DeadlineExceeded, Fenced, ManifestError, PeerLost
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import REGISTER, Directives, Member, Membership
from asyncflow.rpc.server import RpcServer

Join = Callable[..., Any]


@contextlib.asynccontextmanager
async def attached(server: RpcServer, *, heartbeat_s: float, lost_after_s: float) -> AsyncIterator[Directory]:
    made = Directory(heartbeat_s=heartbeat_s, lost_after_s=lost_after_s)
    made.attach(server)
    yield made
    await made.close()


@pytest.fixture
async def directory(server: RpcServer) -> AsyncIterator[Directory]:
    async with attached(server, heartbeat_s=0.1, lost_after_s=0.6) as made:
        yield made


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    memberships: list[Membership] = []

    async def make(driver: str, *, role: str = "rollout", index: int = 0, attempt: int = 0) -> Membership:
        member = Member(
            role=role, index=index, incarnation=uuid.uuid4().hex, attempt=attempt, address=f"tcp://{role}:{index}"
        )
        made = Membership(driver=driver, member=member, status=lambda: {"inflight": index})
        memberships.append(made)
        await made.join(10)
        return made

    yield make
    for membership in memberships:
        await membership.close()


async def until(found: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not found():
            await asyncio.sleep(0.02)


async def test_members_find_each_other(server: RpcServer, directory: Directory, join: Join) -> None:
    first = await join(server.address)
    waiting = asyncio.create_task(first.wait_for(lambda: first.peer("controller"), "the controller", 20))
    controller = await join(server.address, role="controller")
    assert (await waiting).incarnation == controller.member.incarnation
    assert first.address("controller") == "tcp://controller:0"
    assert first.address("storage") is None
    second = await join(server.address, index=1)
    assert [m.index for m in second.peers("rollout")] == [0, 1]
    await until(lambda: directory.status(second.member.incarnation) == {"inflight": 1})
    await second.close()
    await until(lambda: len(first.peers("rollout")) == 1)


async def test_directives_arrive_and_are_told_when_they_change(
    server: RpcServer, directory: Directory, join: Join
) -> None:
    membership = await join(server.address)
    told: list[Directives] = []
    membership.on_directives.append(told.append)
    directory.directives = lambda _: Directives(drain=True)
    assert await membership.wait_for(lambda: membership.directives.drain, "a drain", 20)
    directory.directives = lambda _: Directives(drain=True, checkpoint=1)
    await membership.wait_for(lambda: membership.directives.checkpoint == 1, "a checkpoint", 20)
    assert told == [Directives(drain=True), Directives(drain=True, checkpoint=1)]


async def test_directives_do_not_wait_for_the_next_heartbeat(server: RpcServer, join: Join) -> None:
    async with attached(server, heartbeat_s=30, lost_after_s=60) as directory:
        membership = await join(server.address)
        for number in (1, 2, 3):
            await until(lambda: directory.status(membership.member.incarnation))
            directory.directives = lambda _, number=number: Directives(checkpoint=number)
            directory.answer_all()
            await membership.wait_for(lambda number=number: membership.directives.checkpoint == number, "it", 10)


class Subscriber:
    """Hears broadcasts, and holds numbers."""

    def __init__(self) -> None:
        self.held: tuple[int, ...] = ()
        self.told: list[Any] = []
        self.unknown: list[int] = []

    def holds(self) -> tuple[int, ...]:
        return self.held

    def receive(self, broadcast: msgspec.Raw | None, unknown: tuple[int, ...]) -> None:
        self.told += [] if broadcast is None else [msgspec.msgpack.decode(broadcast)]
        self.unknown += unknown


@pytest.fixture
async def slow_directory(server: RpcServer) -> AsyncIterator[Directory]:
    """A directory whose rhythm is far too slow for what the tests wait for."""
    async with attached(server, heartbeat_s=30.0, lost_after_s=60.0) as made:
        yield made


async def test_broadcasts_reach_a_subscriber_and_what_it_holds_the_directory_before_it_is_time(
    server: RpcServer, slow_directory: Directory, join: Join
) -> None:
    membership, subscriber = await join(server.address), Subscriber()
    held: list[tuple[int, ...]] = []
    slow_directory.held = lambda _, holds: held.append(holds) or tuple(each for each in holds if each > 7)
    slow_directory.broadcast(msgspec.msgpack.encode("first"))
    membership.subscriber = subscriber
    membership.report_soon()
    await until(lambda: subscriber.told == ["first"])
    for word in ("second", "third"):
        slow_directory.broadcast(msgspec.msgpack.encode(word))
        await until(lambda word=word: subscriber.told[-1] == word)
    subscriber.held = (7, 8)
    membership.report_soon()
    await until(lambda: held[-1] == (7, 8) and subscriber.unknown[:1] == [8])
    slow_directory.held = lambda _incarnation, _holds: ()
    membership.report_soon()
    await until(lambda: slow_directory._entries["rollout", 0].parked)
    slow_directory.leave(membership.member.incarnation, "taken for lost")
    await until(lambda: slow_directory.members("rollout") == [membership.member])
    slow_directory.broadcast(msgspec.msgpack.encode("fourth"))
    await until(lambda: subscriber.told[-1] == "fourth")


async def test_a_registration_counts_although_its_answer_was_lost(
    server: RpcServer, directory: Directory, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = await join(server.address)
    call, lost = membership.driver.call, [PeerLost("the answer was lost")]

    async def losing(method: str, *given: Any, **more: Any) -> Any:
        answer = await call(method, *given, **more)
        if method == REGISTER and lost:
            raise lost.pop()
        return answer

    monkeypatch.setattr(membership.driver, "call", losing)
    before = membership.registrations
    directory.leave(membership.member.incarnation, "taken for lost")
    await until(lambda: not lost and membership.connected)
    assert membership.registrations > before


async def test_one_of_many_does_not_report_before_its_turn(
    server: RpcServer, slow_directory: Directory, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow.rpc.directory._PACE_S", 60.0)
    membership, subscriber = await join(server.address), Subscriber()
    membership.subscriber = subscriber
    slow_directory.broadcast(msgspec.msgpack.encode("news"))
    membership.report_soon()
    await until(lambda: subscriber.told == ["news"])
    beats = server.counters.calls["directory.heartbeat"]
    for _ in range(10):
        membership.report_soon()
        await asyncio.sleep(0.01)
    assert server.counters.calls["directory.heartbeat"] == beats


async def test_what_does_not_come_is_said_at_the_deadline(server: RpcServer, directory: Directory, join: Join) -> None:
    membership = await join(server.address)
    with pytest.raises(
        DeadlineExceeded, match=r"rollout-0: a trainer did not come within 0.2 s. Members known: rollou"
    ):
        await membership.wait_for(lambda: membership.peer("trainer"), "a trainer", 0.2)


async def test_nobody_to_join_is_said_at_the_deadline() -> None:
    member = Member(role="rollout", index=0, incarnation="a")
    membership = Membership(driver="tcp://127.0.0.1:1", member=member)
    said = r"joining did not succeed .*; last: .* by tcp://127\.0\.0\.1:1 within .* s: no process listens there$"
    await ends_late(membership.join, says=said)
    await membership.close()
    with pytest.raises(
        ManifestError, match=r"'http://127\.0\.0\.1:1' is not an address\. An address is tcp://HOST:PORT"
    ):
        Membership(driver="http://127.0.0.1:1", member=member)


async def test_one_that_was_replaced_is_told_to_stop_and_stays_away(
    server: RpcServer, directory: Directory, join: Join
) -> None:
    old = await join(server.address)
    new = await join(server.address)
    assert await old.wait_for(lambda: old.directives.stop, "the stop", 20)
    with pytest.raises(Fenced):
        await old.wait_for(lambda: None, "anything", 20)
    assert directory.members("rollout") == [new.member]
    with pytest.raises(Fenced):
        await old.join(5)


async def test_a_member_may_announce_what_else_others_must_know_of_it(
    server: RpcServer, directory: Directory, join: Join
) -> None:
    first, second = await join(server.address), await join(server.address, index=1)
    await second.announce(info={"leaving": True}, timeout=10)
    await first.wait_for(lambda: (it := first.peer("rollout", 1)) and it.info == {"leaving": True}, "the change", 20)


async def test_a_status_that_fails_does_not_end_the_heartbeat(
    server: RpcServer, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[dict[str, Any]] = []
    member = Member(role="rollout", index=0, incarnation="a")
    membership = Membership(driver=server.address, member=member, status=lambda: answers[0])
    await membership.join(10)
    await until(lambda: "a heartbeat failed" in caplog.text)
    answers.append({"fine": True})
    await until(lambda: directory.status("a") == {"fine": True})
    await membership.close()


@pytest.mark.process
async def test_everybody_finds_a_directory_that_was_killed_and_started_again(spawn: Any, join: Join) -> None:
    driver = spawn("directory")
    members = [await join(driver.said, index=i) for i in range(3)]
    await until(lambda: len(members[0].peers("rollout")) == 3)
    driver.kill()
    await until(lambda: not any(m.connected for m in members))
    assert len(members[0].peers("rollout")) == 3
    newcomer = asyncio.create_task(join(driver.said, index=3))
    await asyncio.to_thread(spawn, "directory", driver.said)
    await newcomer
    await until(lambda: all(m.connected and len(m.peers("rollout")) == 4 for m in members))


@pytest.mark.process
async def test_a_killed_member_is_left_and_a_stopped_one_comes_back(
    server: RpcServer, directory: Directory, spawn: Any
) -> None:
    told: list[str] = []
    directory.on_leave.append(lambda m, reason: told.append(f"{m} {reason}"))
    peer = await asyncio.to_thread(spawn, "member", server.address)
    await until(lambda: directory.status(peer.said) == {"state": "working"})
    peer.signal(signal.SIGSTOP)
    await until(lambda: told == ["rollout-7 silent for 0.6 s"])
    peer.signal(signal.SIGCONT)
    await until(lambda: directory.member(peer.said))
    peer.kill()
    await until(lambda: len(told) == 2)
    assert directory.members() == []


@pytest.mark.process
async def test_a_directory_that_was_stopped_loses_nobody(spawn: Any, join: Join) -> None:
    driver = await asyncio.to_thread(spawn, "directory")
    members = [await join(driver.said, index=i) for i in range(2)]
    await until(lambda: len(members[0].peers("rollout")) == 2)
    await until(lambda: members[0]._revision == members[1]._revision)
    revisions = [m._revision for m in members]
    driver.signal(signal.SIGSTOP)
    await until(lambda: not any(m.connected for m in members))
    driver.signal(signal.SIGCONT)
    await until(lambda: all(m.connected for m in members))
    await asyncio.sleep(0.3)
    assert [m._revision for m in members] == revisions
