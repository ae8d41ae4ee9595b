"""Free pages: no two places overlap, and what was given back is found again, lowest first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.rpc.shm import Heap

moves = st.lists(st.one_of(st.integers(1, 40), st.integers(-30, -1)), max_size=120)
"""Above 0: take so many pages; below: give one place back."""


def free_runs(taken: dict[int, int], first: int, end: int) -> list[tuple[int, int]]:
    pages = [page for page in range(first, end) if not any(a <= page < a + n for a, n in taken.items())]
    starts = [page for page in pages if page - 1 not in pages]
    return [(start, next(p for p in range(start, end + 1) if p not in pages)) for start in starts]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3), st.sampled_from([0, 1, 7, 60]), moves)
def test_a_place_is_the_lowest_run_that_is_long_enough_and_overlaps_no_other(first, pages, moves):
    heap, taken = Heap(first=first, end=first + pages), {}
    for move in moves:
        if move < 0 and taken:
            place = list(taken)[-move % len(taken)]
            heap.give_back(place)
            del taken[place]
        elif move > 0:
            runs = free_runs(taken, first, first + pages)
            expected = next((start for start, end in runs if end - start >= move), None)
            place = heap.take(move)
            assert place == expected
            if place is not None:
                taken[place] = move
        assert all(place in heap for place in taken)
    for place in taken:
        heap.give_back(place)
    assert (heap.take(pages) == first) if pages else heap.take(1) is None


def test_what_was_never_taken_cannot_be_given_back():
    heap = Heap(first=1, end=9)
    place = heap.take(3)
    for other in (place + 1, 4, 0, -1):
        assert other not in heap
        with pytest.raises(KeyError):
            heap.give_back(other)
    heap.give_back(place)
    with pytest.raises(KeyError):
        heap.give_back(place)
    assert heap.take(8) == 1
