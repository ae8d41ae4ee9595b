"""The tree along which a version spreads: by itself, simulated with many receivers, and over real sockets."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_world import bulk

from asyncflow.identity import Version
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.slices import Box
from asyncflow.weights.spread import FANOUT, MOST_OVERTAKEN, ROOTS, Spread

SOON = 40.0
PATIENCE = 5
REVIEW = 5
NODES = {"a": "n1", "b": "n1", "c": "n1", "d": "n1", "e": "n2", "f": "n2", "g": "", "h": ""}


class History:
    """Receivers of two layouts on a few nodes that come, ask again, complain, finish, go and come back, over versions.

    Who is taken for lost goes on: its children pull from it, and it, once it is back, asks again.
    """

    def __init__(self) -> None:
        self.spread = Spread()
        self.version = 0
        self.whole: set[str] = set()
        self.sources: dict[str, str | None] = {}
        self.layouts: dict[str, str] = {}
        self.had: dict[str, str] = {}
        self.doubted: set[str] = set()

    def ask(self, receiver: str, layout: str) -> None:
        self.layouts.setdefault(receiver, self.had.get(receiver, layout))
        new, near = receiver not in self.sources, self.near(receiver)
        before = self.sources.get(receiver)
        self.sources[receiver] = self.place(receiver)
        assert not near or not new or self.sources[receiver] in near
        assert new or before not in self.whole - self.doubted or self.sources[receiver] == before

    def place(self, receiver: str, *, failed: set[str] = frozenset()) -> str | None:
        source = self.spread.place(
            receiver,
            layout=self.layouts[receiver],
            node=NODES[receiver],
            failed=failed,
            version=self.version,
            whole=self.whole,
        )
        assert source is None or source in self.layouts, "nobody is sent to who has left"
        return source

    def near(self, receiver: str) -> set[str]:
        """Return who on the receiver's node has what it needs, and room."""
        served = Counter(self.sources.values())
        same = {other for other in self.layouts if NODES[other] == NODES[receiver] != ""}
        able = {other for other in same - self.doubted - {receiver} if served[other] < FANOUT}
        return {
            other
            for other in able
            if self.layouts[other] == self.layouts[receiver] and receiver not in self.upwards(other)
        }

    def upwards(self, receiver: str) -> list[str | None]:
        seen: list[str | None] = [receiver]
        while seen[-1] in self.sources:
            seen.append(self.sources[seen[-1]])
        return seen

    def complain(self, receiver: str, _layout: str) -> None:
        if receiver in self.sources:
            source = self.sources[receiver]
            failed = {"publisher"} if source is None else {source}
            self.doubted |= failed
            self.sources[receiver] = self.place(receiver, failed=failed)
            assert source is None or self.sources[receiver] != source

    def finish(self, receiver: str, _layout: str) -> None:
        if receiver in self.layouts:
            self.spread.clear_doubt(receiver)
            self.whole.add(receiver)
            self.doubted.discard(receiver)

    def publish(self, _receiver: str, _layout: str) -> None:
        self.version += 1
        self.whole, self.doubted = set(), set()

    def leave(self, receiver: str, _layout: str) -> None:
        if receiver in self.layouts:
            self.had[receiver] = self.layouts.pop(receiver)
            self.spread.leave(receiver)
            self.sources.pop(receiver, None)
            self.whole.discard(receiver)
            self.doubted.discard(receiver)

    def come_back(self, receiver: str, _layout: str) -> None:
        if receiver in self.had and receiver not in self.layouts:
            self.layouts[receiver] = self.had[receiver]
            self.spread.join(receiver, layout=self.had[receiver], node=NODES[receiver])

    def check(self) -> None:
        """Nobody waits for itself, and nobody serves too many, or another layout."""
        for receiver in self.sources:
            seen, at = [receiver], self.sources[receiver]
            while at is not None and at in self.sources:
                assert at not in seen
                seen.append(at)
                at = self.sources[at]
        there = Counter(source for source in self.sources.values() if source in self.layouts)
        assert all(count <= FANOUT for count in there.values())
        for receiver, source in self.sources.items():
            assert source not in self.layouts or self.layouts[source] == self.layouts[receiver]


EVENTS = [History.ask, History.complain, History.finish, History.leave, History.come_back, History.publish]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from("abcdefgh"), st.sampled_from(["", "half"]))))
def test_in_any_history_nobody_waits_for_itself_nor_serves_too_many(
    events: list[tuple[Callable[[History, str, str], None], str, str]],
) -> None:
    history = History()
    for event, receiver, layout in events:
        event(history, receiver, layout)
        history.check()


@dataclass
class Swarm:
    """Receivers in steps of a second: each serves what it has, ``rate`` portions a second, to all it serves together.

    on_node: how many run on one node, 0 where it is not known. stopped: who does nothing; slow: who sends and takes one
    portion in twenty seconds. egress: portions by sender; between: portions that went from one node to another.
    """

    size: int
    portions: int = 100
    rate: int = 20
    seed: int = 0
    on_node: int = 0
    stopped: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    spread: Spread = field(default_factory=Spread)
    source: dict[str, str | None] = field(default_factory=dict)
    took: dict[str, int] = field(default_factory=dict)

    def run(self, version: int = 0) -> None:
        """Spread a version; a later one goes from the sources that the one before had, of which nobody asks."""
        rng, spread, source = random.Random(self.seed), self.spread, self.source
        names = [f"r{index}" for index in range(self.size)]
        starts = {name: rng.randrange(3) for name in names}
        node = {name: f"n{index // self.on_node}" if self.on_node else "" for index, name in enumerate(names)}
        review = {name: max(REVIEW, 3 * self.took.get(name, 0) // 2) for name in names}
        rng.shuffle(names)
        has, silent, asked = Counter(), Counter(), {}
        self.egress, self.finished, self.asks, self.between, now = Counter(), {}, 0, 0, 0
        awaited = set(names) - self.stopped - self.slow
        while awaited - self.finished.keys():
            assert now < 10_000
            for name in names:
                if starts[name] == now:
                    asked[name] = now
                    if name not in source:
                        source[name] = spread.place(
                            name, layout="", node=node[name], version=version, whole=self.finished
                        )
            before = dict(has)
            sent: Counter[str | None] = Counter()
            for name in rng.sample(names, len(names)):
                if name not in asked or name in self.finished or name in self.stopped:
                    continue
                giver = source[name]
                ahead = self.portions if giver is None else before.get(giver, 0)
                pace = [self.rate - sent[giver], self.rate // 2, ahead - has[name]]
                if {giver, name} & self.slow:
                    pace.append(int(now % 20 == 0))
                got = 0 if giver in self.stopped else max(0, min(pace))
                sent[giver] += got
                has[name] += got
                self.egress[giver] += got
                self.between += got if not self.on_node or node.get(giver) != node[name] else 0
                silent[name] = silent[name] + 1 if giver in self.stopped else 0
                if has[name] == self.portions:
                    spread.clear_doubt(name)
                    self.finished[name] = now
                    self.took[name] = now - starts[name]
                elif silent[name] > PATIENCE or (giver is not None and now - asked[name] >= review[name]):
                    failed = {giver} if silent[name] > PATIENCE else set()
                    source[name] = spread.place(
                        name, layout="", node=node[name], failed=failed, version=version, whole=self.finished
                    )
                    asked[name] = now
                    self.asks += 1
                    silent[name] = 0
            now += 1


@pytest.mark.parametrize("on_node", [0, 1, 8, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 16, 1000])
def test_the_publishers_send_two_copies_however_many_receivers_there_are(size, on_node):
    swarm = Swarm(size, on_node=on_node)
    swarm.run()
    nodes = math.ceil(size / on_node) if on_node else size
    assert swarm.egress[None] == min(nodes, ROOTS) * swarm.portions
    alone = max(3, swarm.portions / swarm.rate * FANOUT)
    assert max(swarm.finished.values()) <= 3 + alone + 2 * size.bit_length()
    assert sum(swarm.egress.values()) == size * swarm.portions


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_receivers_on_125_nodes_send_little_more_than_one_copy_to_each_node(seed):
    swarm = Swarm(1000, on_node=8, seed=seed)
    swarm.run()
    assert swarm.between <= 1.3 * 125 * swarm.portions


@pytest.mark.parametrize("on_node", [0, 6])
@pytest.mark.parametrize("seed", range(5))
def test_stopped_receivers_delay_the_others_by_little_more_than_their_patience(seed, on_node):
    even = Swarm(60, seed=seed, on_node=on_node)
    even.run()
    stopped = {f"r{index}" for index in random.Random(seed).sample(range(60), 3)}
    swarm = Swarm(60, seed=seed, on_node=on_node, stopped=stopped)
    swarm.run()
    assert max(swarm.finished.values()) <= max(even.finished.values()) + (len(stopped) + 1) * (PATIENCE + 1)
    assert swarm.egress[None] <= (ROOTS + len(stopped)) * swarm.portions


@pytest.mark.parametrize("on_node", [0, 6])
@pytest.mark.parametrize("seed", range(5))
def test_those_below_a_slow_receiver_leave_it_for_others_that_are_done(seed, on_node):
    even = Swarm(60, seed=seed, on_node=on_node)
    even.run()
    slow = {f"r{index}" for index in random.Random(seed).sample(range(60), 2)}
    swarm = Swarm(60, seed=seed, on_node=on_node, slow=slow)
    swarm.run()
    stays = MOST_OVERTAKEN * REVIEW if on_node else 0
    assert max(swarm.finished.values()) <= 2 * max(even.finished.values()) + 3 * REVIEW + stays
    assert swarm.egress[None] <= ROOTS * swarm.portions


@pytest.mark.parametrize("on_node", [0, 8])
@pytest.mark.parametrize("size", [3, 16, 1000])
def test_the_next_version_goes_the_same_way_and_nobody_is_asked(size, on_node):
    swarm = Swarm(size, on_node=on_node)
    swarm.run()
    assert swarm.asks > 0 or size <= ROOTS + 1
    swarm.run(version=1)
    assert swarm.asks == 0
    assert swarm.egress[None] <= ROOTS * swarm.portions
    assert sum(swarm.egress.values()) == size * swarm.portions
    alone = max(3, swarm.portions / swarm.rate * FANOUT)
    assert max(swarm.finished.values()) <= 3 + alone + 2 * size.bit_length()


def test_a_newcomer_finds_the_version_at_who_has_it_and_not_at_the_publisher():
    spread = Spread()
    assert [spread.place(name, layout="") for name in "abc"] == [None, None, "a"]
    late = [spread.place(f"late{index}", layout="", version=1, whole="abc") for index in range(5)]
    assert Counter(late) == {"a": 1, "b": 2, "c": 2}


@pytest.fixture
def crossing() -> Spread:
    """Two receivers pull from publishers, one of another node from these, and one on that node from it."""
    spread = Spread()
    assert [spread.place(name, layout="", node=f"of {name}") for name in "pq"] == [None, None]
    assert spread.place("first", layout="", node="here") == "p"
    assert spread.place("second", layout="", node="here") == "first"
    return spread


def test_a_source_far_away_is_left_for_one_on_the_node_as_soon_as_that_has_the_whole_version(crossing):
    crossing.join("near", layout="", node="here")
    assert crossing.place("first", layout="", node="here") == "p"
    assert crossing.place("first", layout="", node="here", whole={"near", "p"}) == "p", "which has the version itself"
    assert crossing.place("first", layout="", node="here", whole={"near", "q"}) == "near"


def test_a_source_on_the_node_is_left_for_one_far_away_only_where_it_is_slower_than_others(crossing):
    assert crossing.place("first", layout="", node="here", whole={"q"}) == "q"
    assert {crossing.place("second", layout="", node="here", whole={"q"}) for _ in range(2 * MOST_OVERTAKEN)} == {
        "first"
    }
    crossing.place("later", layout="", node="there")
    asked = [crossing.place("second", layout="", node="here", whole={"later"}) for _ in range(MOST_OVERTAKEN)]
    assert asked == ["first"] * (MOST_OVERTAKEN - 1) + ["later"]


def test_that_a_source_was_slow_is_forgotten_with_the_version(crossing):
    crossing.place("later", layout="", node="there")
    for version in range(2 * MOST_OVERTAKEN):
        source = crossing.place("second", layout="", node="here", version=version, whole={"later"})
        assert source == "first"


def test_a_node_keeps_room_for_its_own_unless_the_tree_would_grow_too_deep():
    spread = Spread()
    away = [spread.place(f"r{index}", layout="", node=f"n{index}") for index in range(10)]
    assert away == [None, None, "r0", "r1", "r2", "r3", "r4", "r5", "r0", "r1"]
    spread = Spread()
    near = [[spread.place(f"{name}{index}", layout="", node=f"n{index}") for index in range(8)] for name in "rs"]
    assert near[1] == [f"r{index}" for index in range(8)]
    spread = Spread()
    alone = [spread.place(f"r{index}", layout="") for index in range(8)]
    assert alone == [None, None, "r0", "r0", "r1", "r1", "r2", "r2"], "no other receiver is known to run there"


def test_a_node_serves_few_receivers_of_other_nodes_however_many_it_has():
    spread = Spread()
    for index in range(8):
        spread.place(f"here{index}", layout="", node="here")
    spread.place("root", layout="", node="n")
    away = [spread.place(f"r{index}", layout="", node=f"n{index}") for index in range(6)]
    assert sum(str(source).startswith("here") for source in away) == FANOUT


def test_publishers_are_left_only_where_they_fail():
    spread = Spread()
    assert [spread.place(name, layout="") for name in "abc"] == [None, None, "a"]
    assert spread.place("b", layout="", whole={"a"}) is None
    assert spread.place("b", layout="", whole={"a"}, failed={"publisher"}) == "a"


def test_who_needs_other_boxes_than_before_pulls_from_others_and_serves_others():
    spread = Spread()
    assert [spread.place(name, layout="") for name in "abcd"] == [None, None, "a", "a"]
    assert spread.place("d", layout="half") is None
    assert "a" in [spread.place(name, layout="") for name in "ehijk"], "which has room again"
    assert [spread.place(name, layout="half") for name in "fg"] == [None, "d"]


class CountingTransport(HostTransport):
    """Counts what it serves."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.served = 0

    async def start(self, read, **options):
        def counting(version, tensor, box):
            data = read(version, tensor, box)
            self.served += data.nbytes
            return data

        return await super().start(counting, **options)


async def test_sixteen_receivers_take_two_copies_from_the_trainer_while_none_has_it_whole(world):
    trainer = CountingTransport(name="trainer", bandwidth=6 << 20)
    sender = await world.sender(transport=trainer)
    receivers = [await world.receiver(f"rollout-{index}", want=lambda view: None) for index in range(16)]
    tensors = {f"layer.{index:02}": array for index in range(8) for array in [bulk(index, 1)["big"]]}
    await sender.publish(Version(0, 1), tensors, timeout=SOON)
    await asyncio.gather(*(receiver.ensure(1, timeout=SOON) for receiver in receivers))
    nbytes = sum(array.nbytes for array in tensors.values())
    for receiver in receivers:
        taken = receiver.take(1)[1]
        assert all(
            np.array_equal(taken[name].view(np.uint32), array.view(np.uint32)) for name, array in tensors.items()
        )
        assert receiver.transfers[0].faults == 0
    assert trainer.served <= 2 * nbytes
    finished = [receiver.transfers[0].finished for receiver in receivers]
    began = [receiver.transfers[0].started for receiver in receivers]
    assert max(began) < min(finished), "all of them were on their way at once"


async def test_receivers_of_halves_feed_one_another_as_well(world):
    trainer = CountingTransport(name="trainer")
    sender = await world.sender(transport=trainer)
    tensors = bulk(1, 2)

    def half(at: int):
        def layout(_name, shape):
            size = shape[0] // 2
            return Box((at * size, *(0,) * (len(shape) - 1)), (size, *shape[1:]))

        return layout

    receivers = [await world.receiver(f"r{index}", layout=half(index % 2)) for index in range(8)]
    await sender.publish(Version(0, 1), tensors, timeout=SOON)
    await asyncio.gather(*(receiver.ensure(1, timeout=SOON) for receiver in receivers))
    for index, receiver in enumerate(receivers):
        for name, array in receiver.take(1)[1].items():
            size = tensors[name].shape[0] // 2
            expected = tensors[name][index % 2 * size : (index % 2 + 1) * size]
            assert np.array_equal(array.view(np.uint32), expected.view(np.uint32))
    assert trainer.served <= 2 * sum(array.nbytes for array in tensors.values())


async def test_a_joiner_pulls_from_the_holder_on_its_node_also_when_the_driver_was_restarted(world):
    sender = await world.sender()
    there = [await world.receiver(f"there-{index}", node="there", want=lambda view: None) for index in range(3)]
    here = await world.receiver("here", node="here", want=lambda view: None)
    await sender.publish(Version(0, 1), bulk(1, 1), timeout=SOON)
    for receiver in (*there, here):
        await receiver.ensure(1, timeout=SOON)
    joiner = await world.receiver("joiner", node="here", want=lambda view: None)
    await joiner.ensure(1, timeout=SOON)
    assert set(joiner.transfers[0].holders) == {"here"}
    await world.stop_driver()
    service = await world.start_driver()
    await service.wait_for(lambda known: len(known.holders(Version(0, 1))) == 6, what="all holders", timeout=SOON)
    late = await world.receiver("late", node="here", want=lambda view: None)
    await late.ensure(1, timeout=SOON)
    assert set(late.transfers[0].holders) <= {"here", "joiner"}
