"""Places in a ring: never two things at one place, and a peer that counts otherwise is found out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.net.ring import ALIGN, Emptying, Filling

sizes = st.sampled_from([4 * ALIGN, 8 * ALIGN, 4096, 1 << 16])


@settings(max_examples=200, deadline=None)
@given(sizes, st.lists(st.tuples(st.sampled_from(["fill", "empty", "back"]), st.integers(1, 1 << 15)), max_size=80))
def test_both_sides_name_the_same_places_and_none_twice(size, moves):
    filling, emptying = Filling(size), Emptying(size)
    filled, held = [], []
    for move, count in moves:
        if move == "fill":
            place = filling.place(min(count, size // 2))
            if place.stop > place.start:
                assert place.stop <= size
                assert place.start % ALIGN == 0
                assert all(place.stop <= other.start or other.stop <= place.start for other in filled + held)
                filled.append(place)
        elif move == "empty" and filled:
            first = filled.pop(0)
            assert emptying.place(first.stop - first.start) == first
            held.append(first)
        elif move == "back" and emptying.owed:
            filling.given_back(emptying.give_back())
            held.clear()
    assert emptying.owed == sum(-(-(place.stop - place.start) // ALIGN) * ALIGN for place in held)


@settings(max_examples=100, deadline=None)
@given(sizes, st.lists(st.integers(1, 1 << 16), min_size=1, max_size=40))
def test_who_gives_back_when_it_owes_a_quarter_never_leaves_the_other_without_room(size, counts):
    filling, emptying = Filling(size), Emptying(size)
    for count in counts:
        place = filling.place(min(count, size // 2))
        assert place.stop > place.start
        emptying.place(place.stop - place.start)
        if emptying.owes_much:
            filling.given_back(emptying.give_back())


@pytest.mark.parametrize("count", [0, 63, ALIGN, -ALIGN, 1 << 40])
def test_more_than_was_filled_cannot_be_given_back(count):
    filling = Filling(1024)
    with pytest.raises(ProtocolError):
        filling.given_back(count)
    assert filling.has_room(1024)


def test_what_does_not_lie_in_the_ring_cannot_have_been_filled():
    for count in (0, -1, 1025, 1 << 62):
        with pytest.raises(ProtocolError):
            Emptying(1024).place(count)
    beyond_the_end = Emptying(1024)
    beyond_the_end.place(1000)
    beyond_the_end.give_back()
    assert beyond_the_end.place(24) == slice(0, 24)
    not_given_back = Emptying(1024)
    not_given_back.place(1024)
    with pytest.raises(ProtocolError):
        not_given_back.place(1)
