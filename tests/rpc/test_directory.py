"""The registry alone, with a clock of the test."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import Raw

from asyncflow.errors import Fenced
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Directives, Heartbeat, HeartbeatReply, Member


@dataclass
class Scene:
    now: float = 100.0
    told: list[str] = field(default_factory=list)

    def directory(self) -> Directory:
        made = Directory(heartbeat_s=1.0, lost_after_s=5.0, clock=lambda: self.now)
        made.on_join.append(lambda member: self.told.append(f"+{member.incarnation}"))
        made.on_leave.append(lambda member, reason: self.told.append(f"-{member.incarnation}: {reason}"))
        return made

    def wait(self, directory: Directory, seconds: float) -> list[Member]:
        """Pass time with a sweep each half second, as the server does."""
        lost = []
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            lost += directory.sweep()
        return lost


def member(incarnation: str, *, role: str = "rollout", index: int = 0, attempt: int = 0, address: str = "") -> Member:
    return Member(role=role, index=index, incarnation=incarnation, attempt=attempt, address=address)


def beat(incarnation: str, revision: int = -1) -> Heartbeat:
    return Heartbeat(incarnation=incarnation, revision=revision, status={"inflight": 3})


async def answer(directory: Directory, heartbeat: Heartbeat) -> HeartbeatReply:
    """Return the answer to a heartbeat; one that waits is answered with all others."""
    answered = directory.heartbeat(heartbeat)
    if isinstance(answered, HeartbeatReply):
        return answered
    directory.answer_all()
    return await answered


async def test_a_member_is_known_to_all_and_peers_are_only_sent_when_they_changed() -> None:
    directory = Scene().directory()
    first = directory.register(member("a", index=1, address="tcp://a"))
    second = directory.register(member("b", index=0, address="tcp://b"))
    assert [m.incarnation for m in second.peers] == ["b", "a"]
    assert directory.heartbeat(beat("a", first.revision)).peers == second.peers
    assert (await answer(directory, beat("a", second.revision))).peers is None
    assert directory.status("a") == {"inflight": 3}
    assert directory.members("trainer") == []


def test_nobody_is_told_of_members_that_answer_no_calls() -> None:
    directory = Scene().directory()
    known = directory.register(member("unit", role="storage", address="tcp://unit"))
    for index in range(1000):
        assert directory.register(member(f"rollout {index}", index=index)).peers == known.peers
    directory.leave("rollout 3", "went")
    assert directory.heartbeat(beat("unit", known.revision)).peers is None
    assert len(directory.members("rollout")) == 999


async def test_a_member_may_wait_the_longer_the_more_there_are_and_never_longer_than_all_members() -> None:
    directory = Scene().directory()
    paces = []
    for index in range(2000):
        directory.register(member(f"rollout {index}", index=index))
        paces.append(directory.heartbeat(Heartbeat(incarnation=f"rollout {index}", revision=0, heard=-1)).pace_s)
    assert paces[:3] == pytest.approx([0.001, 0.002, 0.003])
    assert paces[-1] == directory.heartbeat_s
    directory.leave("rollout 0", "went")
    assert (await answer(directory, Heartbeat(incarnation="rollout 1", revision=0))).broadcast is None


async def test_a_parked_heartbeat_is_answered_by_a_change_by_another_and_when_its_member_is_gone() -> None:
    directory = Scene().directory()
    directory.register(member("a"))
    directory.broadcast(b"\xc3")
    number, document = directory.heartbeat(Heartbeat(incarnation="a", revision=0, heard=-1)).broadcast
    assert bytes(document) == b"\xc3"
    parked = directory.heartbeat(Heartbeat(incarnation="a", revision=0, heard=number))
    again = directory.heartbeat(Heartbeat(incarnation="a", revision=0, heard=number))
    assert (await parked).broadcast is None
    directory.broadcast(b"\xc2")
    assert (await again).broadcast == (number + 1, Raw(b"\xc2"))
    last = directory.heartbeat(Heartbeat(incarnation="a", revision=0, heard=number + 1))
    directory.leave("a", "went")
    assert not (await last).known


async def test_a_parked_heartbeat_says_its_time_and_directives_are_no_change_twice() -> None:
    directory = Directory(heartbeat_s=0.05, lost_after_s=5.0)
    directory.register(member("a"))
    directory.broadcast(b"\xc3")
    beat = Heartbeat(
        incarnation="a",
        revision=0,
        heard=directory.heartbeat(Heartbeat(incarnation="a", revision=0, heard=-1)).broadcast[0],
    )
    assert (await directory.heartbeat(beat)).known
    directory.directives = lambda _: Directives(drain=True)
    assert directory.heartbeat(beat).directives.drain
    assert (await directory.heartbeat(beat)).directives.drain


async def test_who_wants_no_broadcast_waits_for_directives_and_for_the_next_heartbeat_alike() -> None:
    directory = Directory(heartbeat_s=0.05, lost_after_s=5.0)
    directory.register(member("a"))
    assert directory.heartbeat(beat("a")).directives == Directives()
    parked = directory.heartbeat(beat("a", directory.revision))
    directory.broadcast(b"\xc3")
    await asyncio.sleep(0)
    assert not parked.done()
    directory.directives = lambda _: Directives(stop=True)
    directory.answer_all()
    assert parked.result().directives.stop
    assert parked.result().broadcast is None
    assert (await directory.heartbeat(beat("a", directory.revision))).directives.stop, "after heartbeat_s, without news"


def test_a_restarted_directory_asks_everybody_to_register_again() -> None:
    assert not Scene().directory().heartbeat(beat("a")).known


def test_a_silent_member_is_left_and_may_come_back() -> None:
    scene = Scene()
    directory = scene.directory()
    directory.register(member("a"))
    assert scene.wait(directory, 4.5) == []
    assert directory.silent_s("a") == 4.5
    assert [m.incarnation for m in scene.wait(directory, 0.5)] == ["a"]
    assert not directory.heartbeat(beat("a")).known
    directory.register(member("a"))
    assert scene.told == ["+a", "-a: silent for 5 s", "+a"]


async def test_a_heartbeat_keeps_a_member() -> None:
    scene = Scene()
    directory = scene.directory()
    directory.register(member("a"))
    for _ in range(5):
        assert scene.wait(directory, 4) == []
        directory.heartbeat(beat("a"))


def test_time_in_which_the_directory_slept_is_nobodys_silence() -> None:
    scene = Scene()
    directory = scene.directory()
    directory.register(member("a"))
    scene.wait(directory, 2)
    scene.now += 3600
    assert directory.sweep() == []
    assert directory.silent_s("a") == pytest.approx(4)
    assert [m.incarnation for m in scene.wait(directory, 1)] == ["a"]


def test_a_new_incarnation_replaces_the_old_one_which_never_returns() -> None:
    scene = Scene()
    directory = scene.directory()
    directory.register(member("a"))
    directory.register(member("b"))
    assert scene.told == ["+a", "-a: replaced by a newer incarnation", "+b"]
    assert not directory.heartbeat(beat("a")).known
    with pytest.raises(Fenced, match="rollout-0 was replaced"):
        directory.register(member("a"))
    assert [m.incarnation for m in directory.members()] == ["b"]


def test_an_older_attempt_does_not_replace_a_newer_one() -> None:
    directory = Scene().directory()
    directory.register(member("a", attempt=2))
    with pytest.raises(Fenced):
        directory.register(member("b", attempt=1))
    directory.register(member("c", attempt=2))


def test_one_incarnation_has_one_place() -> None:
    directory = Scene().directory()
    directory.register(member("a"))
    with pytest.raises(Fenced, match="already rollout-0"):
        directory.register(member("a", index=1))


def test_registering_again_changes_what_others_know_and_is_no_new_join() -> None:
    scene = Scene()
    directory = scene.directory()
    directory.register(member("a"))
    before = directory.revision
    directory.register(member("a", address="tcp://here"))
    assert directory.member("a") == member("a", address="tcp://here")
    assert (directory.revision, scene.told) == (before + 1, ["+a"])
    directory.register(member("a", address="tcp://here"))
    assert directory.revision == before + 1


async def test_directives_are_repeated_in_every_heartbeat() -> None:
    directory = Scene().directory()
    directory.directives = lambda m: Directives(drain=m.index == 1, checkpoint=2)
    directory.register(member("a"))
    directory.register(member("b", index=1))
    for _ in range(2):
        assert (await answer(directory, beat("a"))).directives == Directives(checkpoint=2)
        assert (await answer(directory, beat("b"))).directives == Directives(drain=True, checkpoint=2)


def test_a_member_that_leaves_is_gone_at_once() -> None:
    scene = Scene()
    directory = scene.directory()
    directory.register(member("a"))
    directory.leave("a", "drained")
    directory.leave("a", "drained")
    assert scene.told == ["+a", "-a: drained"]
    assert (directory.member("a"), directory.silent_s("a"), directory.status("a")) == (None, None, {})


@pytest.mark.parametrize(("heartbeat_s", "lost_after_s"), [(0.0, 5.0), (5.0, 5.0), (6.0, 5.0)])
def test_nobody_is_lost_before_the_next_heartbeat_is_due(heartbeat_s: float, lost_after_s: float) -> None:
    with pytest.raises(ValueError, match="must be longer than heartbeat_s"):
        Directory(heartbeat_s=heartbeat_s, lost_after_s=lost_after_s)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: joins and leaves are told in pairs, and places are never shared."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.here: dict[str, Member] = {}
        self.directory = Directory(heartbeat_s=1.0, lost_after_s=5.0, clock=lambda: self.now)
        self.directory.on_join.append(self.joined)
        self.directory.on_leave.append(self.left)
        self.revisions = {0: list[Member]()}
        self.runner = asyncio.Runner()

    def teardown(self) -> None:
        self.runner.close()

    def joined(self, new: Member) -> None:
        assert new.incarnation not in self.here
        assert (new.role, new.index) not in {(m.role, m.index) for m in self.here.values()}
        self.here[new.incarnation] = new

    def left(self, old: Member, reason: str) -> None:
        assert reason
        assert self.here.pop(old.incarnation).index == old.index

    @rule(
        name=st.sampled_from("abcdef"), index=st.integers(0, 2), attempt=st.integers(0, 2), address=st.text(max_size=1)
    )
    def register(self, name: str, index: int, attempt: int, address: str) -> None:
        try:
            registered = self.directory.register(member(name, index=index, attempt=attempt, address=address))
        except Fenced:
            return
        assert name in self.here
        assert registered.peers == [it for it in self.directory.members() if it.address]

    @rule(name=st.sampled_from("abcdef"), back=st.integers(0, 3))
    def heartbeat(self, name: str, back: int) -> None:
        known = max(0, self.directory.revision - back)
        told = self.runner.run(answer(self.directory, beat(name, known)))
        assert told.known == (name in self.here)
        if told.known:
            assert (told.peers is None) == (back == 0 or known == self.directory.revision)

    @rule(name=st.sampled_from("abcdef"))
    def leave(self, name: str) -> None:
        self.directory.leave(name, "went")
        assert name not in self.here

    @rule(seconds=st.floats(0, 20))
    def sweep(self, seconds: float) -> None:
        self.now += seconds
        self.directory.sweep()

    @invariant()
    def what_was_told_is_what_is(self) -> None:
        members = self.directory.members()
        assert {m.incarnation for m in members} == set(self.here)
        assert len({(m.role, m.index) for m in members}) == len(members)
        peers = self.directory.peers()
        assert self.revisions.setdefault(self.directory.revision, peers) == peers


TestAnyOrder = AnyOrder.TestCase
