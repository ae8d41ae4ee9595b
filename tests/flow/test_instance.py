"""The state machine alone, and then in a small world whose events come in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.flow.instance import Claim, Instance, Work
from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import NEWEST, Version


def work(name, step, *, newest=None, purpose="train"):
    return Work(name, purpose, VersionWindow(step, step if newest is None else newest))


def at(step, *, swap_at="quota", slots=4, **settings):
    instance = Instance(swap_at=swap_at, slots=slots, **settings)
    instance.update_versions(staged=Version(0, step), in_memory=[step], available=[step])
    assert instance.swap() == step
    instance.loaded(Version(0, step))
    instance.update_versions(staged=None, in_memory=[step], available=[step])
    instance.claim_was_empty("eval")
    return instance


def begin(instance, *works):
    assert instance.hold(works) == []
    instance.ready([w.id for w in works])
    return [w.id for w in instance.admit()]


def stage(instance, step, *, attempt=0):
    memory = {instance.current.step, step}
    instance.update_versions(staged=Version(attempt, step), in_memory=memory, available=memory)


def test_without_weights_it_claims_nothing_and_wants_the_newest():
    instance = Instance(swap_at="quota", slots=4)
    assert instance.next_claim("train") is None
    assert instance.next_claim("eval") is None
    assert instance.swap() is None
    assert instance.next_pull([], required=[]) is None
    assert instance.next_pull([Version(0, 3), Version(0, 4)], required=[3]) == 4


def test_quota_works_for_its_version_and_then_goes_where_a_claim_leads():
    instance = at(0, slots=6)
    assert instance.next_claim("train") == Claim(0, (), 6)
    assert begin(instance, work("a", 0), work("b", 0)) == ["a", "b"]
    assert instance.next_claim("train") == Claim(0, (), 4)
    stage(instance, 1)
    assert instance.next_claim("train") == Claim(0, (1,), 4)
    assert instance.swap() is None
    assert begin(instance, work("c", 1)) == []
    assert instance.next_claim("train") is None
    assert instance.swap() is None
    instance.release("a")
    instance.release("b")
    assert instance.swap() == 1
    instance.loaded(Version(0, 1))
    assert [w.id for w in instance.admit()] == ["c"]


def test_quota_idle_takes_what_only_an_older_version_may_make():
    instance = at(5)
    instance.update_versions(staged=None, in_memory=[5], available=[3, 5])
    assert instance.next_claim("train") == Claim(5, (3,), 4)
    assert begin(instance, work("a", 5)) == ["a"]
    assert instance.next_claim("train") == Claim(5, (), 3)
    instance.release("a")
    assert begin(instance, work("old", 3)) == []
    assert instance.next_pull([Version(0, 3), Version(0, 5)], required=[3]) == 3
    assert instance.swap() == 3
    instance.update_versions(staged=Version(0, 5), in_memory=[3, 5], available=[3, 5])
    instance.loaded(Version(0, 3))
    assert [w.id for w in instance.admit()] == ["old"]
    instance.claim_was_empty("eval")
    assert instance.next_claim("train") == Claim(3, (5,), 3)
    instance.release("old")
    instance.update_versions(staged=None, in_memory=[3], available=[3, 5])
    assert instance.next_claim("train") == Claim(3, (5,), 4), "what it left can be had again"


def test_quota_idle_loads_what_is_staged_and_goes_back_for_rows_that_need_an_older_version():
    instance = at(0)
    instance.claim_was_empty("train")
    assert instance.swap() is None
    stage(instance, 1)
    assert instance.next_claim("train") == Claim(0, (1,), 4), "it claims until the swap"
    assert instance.swap() == 1
    instance.loaded(Version(0, 1))
    instance.update_versions(staged=None, in_memory=[0, 1], available=[0, 1])
    assert instance.next_claim("train") == Claim(1, (), 4), "of an instance that still evaluates nothing is known yet"
    instance.claim_was_empty("eval")
    assert instance.next_claim("train") == Claim(1, (0,), 4)
    assert begin(instance, work("old", 0)) == []
    assert instance.swap() == 0


def test_quota_idle_does_not_go_to_and_fro_while_rows_of_the_older_version_come_one_by_one():
    instance = at(0)
    stage(instance, 1)
    instance.claim_was_empty("train")
    assert instance.swap() == 1
    instance.loaded(Version(0, 1))
    instance.claim_was_empty("eval")
    assert begin(instance, work("first", 0)) == []
    assert instance.swap() == 0
    instance.loaded(Version(0, 0))
    instance.claim_was_empty("eval")
    for name in ("first", "second"):
        assert [w.id for w in instance.admit()] == [name]
        instance.release(name)
        instance.claim_was_empty("train")
        assert instance.swap() is None
        assert instance.next_claim("train") == Claim(0, (1,), 4)
        instance.hold([work("second", 0)])
        instance.ready(["second"])
    instance.release("second")
    instance.update_versions(staged=Version(0, 2), in_memory=[0, 1, 2], available=[0, 1, 2])
    instance.claim_was_empty("train")
    assert instance.swap() == 2, "it has not been there yet"


def test_sequence_stops_admitting_lets_run_out_and_swaps():
    instance = at(4, swap_at="sequence")
    assert begin(instance, work("a", 3, newest=NEWEST)) == ["a"]
    assert instance.next_claim("train") == Claim(4, (), 3)
    stage(instance, 6)
    assert instance.next_claim("train") is None
    assert begin(instance, work("late", 3, newest=NEWEST)) == []
    assert instance.swap() is None
    instance.release("a")
    assert instance.swap() == 6
    instance.loaded(Version(0, 6))
    assert [w.id for w in instance.admit()] == ["late"]


def test_sequence_goes_on_from_a_restarted_trainer():
    instance = at(7, swap_at="sequence")
    stage(instance, 5, attempt=1)
    assert instance.swap() == 5
    instance.loaded(Version(1, 5))
    assert instance.next_claim("train") == Claim(5, (), 4)
    assert instance.hold([work("gone", 2, newest=4)]) == [work("gone", 2, newest=4)]


def test_sequence_swaps_to_an_older_version_for_evaluation_only():
    instance = at(6, swap_at="sequence")
    instance.update_versions(staged=None, in_memory=[6], available=[5, 6])
    assert begin(instance, work("a", 4, newest=NEWEST)) == ["a"]
    assert instance.next_claim("eval") == Claim(6, (5,), 1)
    assert begin(instance, work("e", 5, purpose="eval"), work("b", 4, newest=NEWEST)) == ["b"]
    assert instance.swap() is None
    instance.release("a")
    instance.release("b")
    assert instance.swap() == 5
    instance.update_versions(staged=Version(0, 6), in_memory=[5, 6], available=[5, 6])
    instance.loaded(Version(0, 5))
    assert begin(instance, work("c", 4, newest=NEWEST)) == ["e"]
    instance.release("e")
    assert instance.swap() == 6
    instance.loaded(Version(0, 6))
    assert [w.id for w in instance.admit()] == ["c"]


def test_sequence_fetches_again_what_it_left_for_an_evaluation_and_no_longer_has():
    instance = at(6, swap_at="sequence")
    instance.update_versions(staged=None, in_memory=[6], available=[5, 6])
    begin(instance, work("e", 5, purpose="eval"))
    assert instance.swap() == 5
    instance.loaded(Version(0, 5))
    instance.update_versions(staged=None, in_memory=[5], available=[5])
    assert [w.id for w in instance.admit()] == ["e"]
    assert begin(instance, work("a", 4, newest=NEWEST)) == [], "θ5 is older than what it had"
    instance.release("e")
    assert instance.next_pull([Version(0, 5), Version(0, 6)], required=[]) == 6


def test_evaluation_takes_a_quarter_of_the_slots_from_training_and_none_beyond_them():
    instance = at(2, swap_at="sequence", slots=8)
    begin(instance, work("t", 2, newest=NEWEST))
    rooms = []
    for name in ("e", "f"):
        instance.hold([work(name, 2, purpose="eval")])
        rooms.append(instance.next_claim("eval"))
    assert rooms == [Claim(2, (), 1), None]
    instance.release("e")
    instance.release("f")
    begin(instance, *(work(i, 2, newest=NEWEST) for i in range(7)))
    assert instance.next_claim("eval") is None


def test_token_carries_training_rows_over_to_a_newer_version():
    instance = at(4, swap_at="token")
    assert begin(instance, work("a", 3, newest=NEWEST)) == ["a"]
    stage(instance, 6)
    assert instance.next_claim("train") == Claim(4, (), 3), "nothing waits for the swap"
    instance.hold([work("fetched", 3, newest=NEWEST)])
    assert instance.swap() == 6
    instance.loaded(Version(0, 6))
    assert instance.running == 1
    assert not instance.waits(7, required=[])


def test_token_asks_for_evaluation_before_a_swap_however_full_it_is():
    instance = at(4, swap_at="token")
    begin(instance, *(work(i, 3, newest=NEWEST) for i in range(4)))
    assert instance.next_claim("train") is None
    assert instance.next_claim("eval") is None
    stage(instance, 6)
    instance.loaded(Version(0, 6))
    stage(instance, 7)
    assert instance.next_claim("train") is None
    assert instance.next_claim("eval") == Claim(6, (), 1)
    assert instance.swap() is None
    instance.claim_was_empty("eval")
    assert instance.swap() == 7


@pytest.mark.parametrize("swap_at", ["sequence", "token"])
def test_staggered_it_goes_on_as_if_nothing_were_staged_until_it_has_its_permit(swap_at):
    instance = at(4, swap_at=swap_at, staggered=True)
    assert begin(instance, work("a", 3, newest=NEWEST)) == ["a"]
    assert not instance.wants_permit
    stage(instance, 6)
    assert instance.wants_permit
    assert instance.next_claim("train") == Claim(4, (), 3)
    assert instance.next_claim("eval") == Claim(4, (), 1), "θ6 is not gone to for an evaluation either"
    assert instance.swap() is None
    assert begin(instance, work("b", 3, newest=NEWEST)) == ["b"]
    instance.take_permit()
    assert not instance.wants_permit
    if swap_at == "sequence":
        assert instance.next_claim("train") is None
        instance.release("a")
        instance.release("b")
    assert instance.swap() == 6
    instance.loaded(Version(0, 6))
    stage(instance, 7)
    assert instance.wants_permit == (swap_at == "token"), "with nothing to do it needs no permit"


def test_rows_that_were_claimed_before_the_trainer_began_again_are_given_back():
    instance = at(7, swap_at="token")
    stage(instance, 5, attempt=1)
    instance.hold([work("held", 6, newest=NEWEST)])
    assert instance.swap() is None, "it is begun first, as θ5 must not make it"
    instance.ready(["held"])
    assert [w.id for w in instance.admit()] == ["held"]
    assert instance.swap() is None
    instance.release("held")
    assert instance.swap() == 5
    instance.loaded(Version(1, 5))
    late = work("claimed meanwhile", 6, newest=NEWEST)
    assert instance.hold([late]) == [late]


def test_token_carries_nothing_over_that_the_newer_version_must_not_make():
    instance = at(7, swap_at="token")
    assert begin(instance, work("a", 6, newest=NEWEST)) == ["a"]
    stage(instance, 5, attempt=1)
    assert instance.swap() is None, "the trainer began again, and θ5 is too old for this row"
    instance.release("a")
    assert instance.swap() == 5
    instance.loaded(Version(1, 5))
    assert begin(instance, work("b", 5, newest=NEWEST)) == ["b"]
    with pytest.raises(ValueError, match="1 sequences ran"):
        instance.loaded(Version(0, 4))


def test_token_lets_evaluation_end_under_its_version_and_goes_back_only_when_nothing_runs():
    instance = at(6, swap_at="token")
    assert begin(instance, work("e", 6, purpose="eval"), work("a", 5, newest=NEWEST)) == ["e", "a"]
    stage(instance, 7)
    assert instance.swap() is None
    assert instance.next_claim("train") == Claim(6, (), 2)
    instance.release("e")
    instance.claim_was_empty("eval")
    assert instance.swap() == 7
    instance.loaded(Version(0, 7))
    instance.update_versions(staged=None, in_memory=[6, 7], available=[6, 7])
    instance.hold([work("late", 6, purpose="eval")])
    instance.ready(["late"])
    assert instance.swap() is None
    instance.release("a")
    assert instance.swap() == 6


@pytest.mark.parametrize("swap_at", ["quota", "sequence"])
def test_a_version_is_not_left_while_its_evaluation_has_rows(swap_at):
    instance = at(2, swap_at=swap_at, slots=8)
    begin(instance, work("t", 2, newest=NEWEST if swap_at == "sequence" else 2))
    assert begin(instance, work("e", 2, purpose="eval")) == ["e"]
    stage(instance, 3)
    assert instance.next_claim("eval") == Claim(2, (), 1)
    assert instance.next_claim("train") == (Claim(2, (), 6) if swap_at == "quota" else None)
    instance.release("t")
    instance.release("e")
    assert instance.next_claim("eval").rows == 8
    assert instance.swap() is None
    instance.claim_was_empty("eval")
    assert instance.swap() == (3 if swap_at == "sequence" else None)
    assert instance.next_claim("train") == (Claim(2, (3,), 8) if swap_at == "quota" else None)


def test_rows_that_are_fetched_hold_up_the_swap_and_a_drain_ends_all():
    instance = at(0)
    stage(instance, 1)
    instance.hold([work("slow", 0), work("next", 1)])
    instance.ready(["next"])
    assert instance.admit() == []
    assert instance.swap() is None
    instance.release("slow")
    assert instance.swap() == 1
    instance.drain()
    assert instance.swap() is None
    assert instance.next_claim("train") is None
    assert instance.next_claim("eval") is None


def test_a_drain_claims_and_begins_nothing_however_much_there_is():
    instance = at(0)
    instance.hold([work("held", 0)])
    instance.ready(["held"])
    assert instance.next_claim("train") is not None
    instance.drain()
    assert (instance.next_claim("train"), instance.next_claim("eval"), instance.admit()) == (None, None, [])
    assert instance.held == 1, "it is handed on"


def test_it_evaluates_while_nothing_else_runs():
    instance = at(0)
    assert not instance.evaluating
    begin(instance, work("t", 0), work("e", 0, purpose="eval"))
    assert not instance.evaluating
    instance.release("t")
    assert instance.evaluating


def test_it_wants_what_unfinished_steps_need_before_what_is_newest():
    versions = [Version(0, step) for step in range(3, 9)]
    instance = at(4)
    assert instance.next_pull(versions, required=[4, 6, 7]) == 6
    assert instance.next_pull(versions, required=[]) == 8
    assert instance.next_pull(versions[:2], required=[4]) is None


def test_it_waits_for_weights_only_while_work_needs_others_and_nothing_runs():
    instance = at(0)
    assert not instance.waits(None, required=[0])
    assert not instance.waits(1, required=[0]), "nothing unfinished needs θ1"
    assert not instance.waits(1, required=[0, 1]), "claims find work for θ0 as far as is known"
    instance.claim_was_empty("train")
    assert instance.waits(1, required=[0, 1])
    begin(instance, work("a", 0))
    assert not instance.waits(1, required=[0, 1])
    instance.release("a")
    assert not instance.waits(1, required=[0, 1]), "between two sequences of θ0"
    stage(instance, 1)
    instance.claim_was_empty("train")
    assert instance.waits(1, required=[1]), "here and not loaded is waited for as well"
    assert begin(instance, work("b", 1)) == []
    assert instance.waits(None, required=[])
    instance.loaded(Version(0, 1))
    assert not instance.waits(None, required=[1])
    instance = at(0, swap_at="sequence")
    instance.claim_was_empty("train")
    assert instance.waits(1, required=[])


@dataclass
class World:
    """One instance, the pools that it claims from, and a catalogue."""

    instance: Instance
    swap_at: str
    rows: list[Work]
    slots: int
    staggered: bool = False
    published: list[Version] = field(default_factory=list)
    memory: set[Version] = field(default_factory=set)
    began: dict[object, Version] = field(default_factory=dict)
    running: dict[object, Work] = field(default_factory=dict)
    done: set[object] = field(default_factory=set)
    floor: Version | None = None
    has_permit: bool = False

    def permit(self):
        if self.instance.wants_permit:
            self.instance.take_permit()
            self.has_permit = True

    def tell(self):
        current = self.instance.current
        staged = max((v for v in self.memory if current is None or v > current), default=None)
        steps, published = {v.step for v in self.memory}, {v.step for v in self.published}
        self.instance.update_versions(staged=staged, in_memory=steps, available=steps | published)

    def publish(self):
        self.published.append(Version(0, len(self.published)))

    def pull(self):
        required = {w.window.oldest for w in self.rows if w.window.oldest == w.window.newest}
        step = self.instance.next_pull(self.published, required=required)
        if step is not None:
            self.memory.add(self.published[step])

    def claim(self, purpose):
        wanted = self.instance.next_claim(purpose)
        if wanted is None:
            return False
        assert 0 < wanted.rows <= self.slots + 2
        for steps in ([wanted.version], wanted.accept):
            fit = [
                w
                for w in self.rows
                if w.purpose == purpose and any(w.window.oldest <= s <= w.window.newest for s in steps)
            ][: wanted.rows]
            if fit:
                self.rows = [w for w in self.rows if w not in fit]
                assert self.instance.hold(fit) == []
                self.instance.ready([w.id for w in fit])
                return True
        self.instance.claim_was_empty(purpose)
        return False

    def admit(self):
        begun = self.instance.admit()
        for w in begun:
            version = self.instance.current
            assert w.window.oldest <= version.step <= w.window.newest
            if self.swap_at != "quota" and w.purpose == "train":
                assert self.floor is None or version >= self.floor
                self.floor = version
            assert w.id not in self.began
            self.began[w.id] = version
            self.running[w.id] = w
        assert self.instance.running <= self.slots + 2
        return bool(begun)

    def finish(self, which):
        running = [i for i in self.began if i not in self.done]
        if running:
            name = running[which % len(running)]
            self.done.add(name)
            del self.running[name]
            self.instance.release(name)

    def swap(self):
        step = self.instance.swap()
        if step is None:
            return False
        version = self.published[step]
        for w in self.running.values():
            assert self.swap_at == "token"
            assert w.purpose == "train"
            assert version > self.instance.current
            assert w.window.oldest <= step <= w.window.newest
        if version not in self.memory:
            return False
        assert version != self.instance.current
        if self.staggered and self.running and version > self.instance.current:
            assert self.has_permit
        self.instance.loaded(version)
        self.has_permit = False
        return True


@st.composite
def worlds(draw):
    swap_at = draw(st.sampled_from(["quota", "sequence", "token"]))
    steps = draw(st.integers(1, 6))
    rows = []
    for k in range(1, steps + 1):
        oldest = max(0, k - 2)
        window = VersionWindow(oldest, oldest if swap_at == "quota" else NEWEST)
        rows += [Work((k, i), "train", window) for i in range(draw(st.integers(0, 6)))]
        pinned = VersionWindow(k - 1, k - 1)
        rows += [Work(("e", k, i), "eval", pinned) for i in range(draw(st.integers(0, 3)))]
    slots = draw(st.integers(1, 5))
    staggered = swap_at != "quota" and draw(st.booleans())
    instance = Instance(swap_at=swap_at, slots=slots, staggered=staggered)
    return World(instance, swap_at, draw(st.permutations(rows)), slots, staggered), steps


@settings(max_examples=300, deadline=None)
@given(worlds(), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 99)), max_size=120))
def test_any_order_of_events_keeps_the_invariants_and_everything_is_served(made, events):
    world, steps = made
    total = len(world.rows)
    actions = [
        world.pull,
        lambda: world.claim("train"),
        lambda: world.claim("eval"),
        world.admit,
        world.swap,
        world.permit,
        lambda: world.publish() if len(world.published) < steps else None,
    ]
    for action, which in events:
        world.tell()
        if action < len(actions):
            actions[action]()
        else:
            world.finish(which)
    while len(world.published) < steps:
        world.publish()
    for _ in range(60 + 20 * total):
        if len(world.done) == total:
            break
        for act in (*actions[:6], lambda: world.finish(0)):
            world.tell()
            act()
    assert len(world.done) == total, (world.instance.current, world.rows, world.instance.held)
    if world.swap_at == "quota":
        assert all(v.step == name[0] - 2 or v.step == 0 for name, v in world.began.items() if name[0] != "e")
