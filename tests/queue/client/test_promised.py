"""A lane takes what a unit sends it unasked, and asks where that does not come; servers answer what a test says."""

import select
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from asyncflow.errors import Refused
from asyncflow.net.rpc.blocking_link import LOOK_S
from asyncflow.queue.client.lane import Lane
from asyncflow.queue.client.verbs import Ask, Expect, Place, Reserve, Together

sys.path.insert(0, str(Path(__file__).parent))
from server_world import Heard, Say, world


@pytest.fixture
def made():
    with world(0, 1) as servers:
        yield servers


@pytest.fixture
def lane(made):
    with closing(Lane(resolve=made.address, keys=None)) as one:
        one.run(word_of(0, "hello"))
        yield one


def word_of(unit, word, promised=None, timeout=20.0):
    answer, _ = yield Ask(unit, "say", Say(word), Heard, timeout, promised=promised)
    return answer.word


def send(made, place, word, *, unit=0):
    """Have a unit answer unasked."""

    async def answer():
        made.servers[unit].answer_unasked(place.seat, place.call, "say", Say(word))

    made.run(answer())


def asked(made, word):
    return made.calls.count((0, word))


def test_an_answer_that_is_there_already_is_taken(made, lane):
    def verb():
        place = yield Reserve()
        send(made, place, "ahead")
        yield Expect(0, place)
        return [(yield from word_of(0, "ahead", place)), (yield from word_of(0, "ahead", place))]

    assert lane.run(verb()) == ["0: ahead", "0: ahead"]
    assert asked(made, "ahead") == 2


def test_an_answer_that_comes_while_another_is_awaited_is_kept_for_the_next_verb(made, lane):
    def verb():
        place = yield Reserve()
        send(made, place, "ahead")
        yield Expect(0, place)
        return place, [(yield from word_of(1, "other")), (yield from word_of(0, "same"))]

    place, words = lane.run(verb())
    assert words == ["1: other", "0: same"]
    assert lane.run(word_of(0, "ahead", place)) == "0: ahead"
    assert asked(made, "ahead") == 1


def test_an_answer_that_comes_later_is_awaited(made, lane):
    def verb():
        place = yield Reserve()
        yield Expect(0, place)
        timer = threading.Timer(0.02, send, (made, place, "ahead"))
        timer.start()
        word = yield from word_of(0, "ahead", place)
        timer.join()
        return word

    assert lane.run(verb()) == "0: ahead"


@pytest.mark.parametrize("sent", [True, False], ids=["late", "never"])
def test_what_does_not_come_soon_is_asked_for(made, lane, sent):
    def verb():
        place = yield Reserve()
        if sent:
            send(made, place, "slowly")
        yield Expect(0, place)
        return (yield from word_of(0, "slowly", place))

    assert lane.run(verb()) == "0: slowly"
    assert asked(made, "slowly") == 1 + sent
    assert lane.run(word_of(0, "then")) == "0: then"


def test_an_error_is_asked_for(made, lane):
    def verb():
        place = yield Reserve()
        send(made, place, "refused")
        yield Expect(0, place)
        yield from word_of(0, "other")
        yield from word_of(0, "refused", place)

    with pytest.raises(Refused, match="no such word"):
        lane.run(verb())
    assert asked(made, "refused") == 2


def test_who_has_broken_off_since_is_asked(made, lane):
    def verb():
        place = yield Reserve()
        yield Expect(0, place)
        made.stop(0)
        made.start(0)
        return (yield from word_of(0, "ahead", place))

    assert lane.run(verb()) == "0: ahead"
    assert asked(made, "ahead") == 1


@pytest.mark.parametrize("unit", [0, 1])
def test_nothing_is_expected_of_a_unit_that_did_not_know_the_lane(made, lane, unit):
    def verb():
        place = yield Reserve()
        if unit == 0:
            made.stop(0)
            made.start(0)
        yield from word_of(unit, "hello")
        send(made, place, "ahead", unit=unit)
        yield Expect(unit, place)
        return (yield from word_of(unit, "ahead", place))

    assert lane.run(verb()) == f"{unit}: ahead"
    assert made.calls.count((unit, "ahead")) == 2


def test_only_who_names_the_very_place_is_answered_so(made, lane):
    def verb():
        place = yield Reserve()
        send(made, place, "ahead")
        yield Expect(0, place)
        another = Place(place.seat + 1, place.call)
        words = []
        for ask in ((1, "a", place), (0, "b"), (0, "c", another), (0, "d", place)):
            words.append((yield from word_of(*ask)))
        return words

    assert lane.run(verb()) == ["1: a", "0: b", "0: c", "0: ahead"]
    assert [asked(made, word) for word in ("ahead", "b", "c", "d")] == [1, 1, 1, 0]


@pytest.mark.parametrize(("timeout", "wait"), [(0.36, 0.09), (20.0, LOOK_S)])
def test_who_has_little_time_keeps_most_of_it_to_ask(made, lane, timeout, wait):
    def verb():
        place = yield Reserve()
        yield Expect(0, place)
        return (yield from word_of(0, "ahead", place, timeout))

    link = lane._links.to(0)
    waits, receive = [], link.receive
    link.receive = lambda seconds: waits.append(seconds) or receive(seconds)
    assert lane.run(verb()) == "0: ahead"
    assert (waits[0], lane._links.to(0)) == (wait, link)


@pytest.mark.parametrize("effect", [Reserve(), Together([word_of(1, "a"), word_of(1, "b")])], ids=["next", "together"])
def test_what_was_promised_is_forgotten(made, lane, effect):
    def verb():
        place = yield Reserve()
        send(made, place, "ahead")
        yield Expect(0, place)
        assert select.select([lane._links.to(0).socket], [], [], 10)[0]
        yield effect
        assert not lane._links.to(0).receive(0.0)
        return (yield from word_of(0, "ahead", place))

    assert lane.run(verb()) == "0: ahead"
    assert asked(made, "ahead") == 2


def test_verbs_that_go_on_together_are_promised_nothing(made, lane):
    def one():
        place = yield Reserve()
        yield Expect(0, Place(1, 0))
        return place, (yield from word_of(0, "a"))

    def both():
        return (yield Together([one(), one()]))

    assert lane.run(both()) == [(None, "0: a")] * 2
