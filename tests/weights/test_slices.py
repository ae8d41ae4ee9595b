"""The arithmetic of boxes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import StaleHandle
from asyncflow.weights.slices import Arena, Box, hull, intersect, route, split, subtract, view

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


@st.composite
def cases(draw, count=4):
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), min_size=1, max_size=count))


@st.composite
def shardings(draw, shape):
    """Cut a tensor into tiles along every axis: any mixture of data, tensor and pipeline layouts."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    tiles = [Box((), ())]
    for marks in cuts:
        spans = list(pairwise(marks))
        tiles = [Box((*t.offset, low), (*t.extent, high - low)) for t in tiles for low, high in spans]
    return tiles


def mask(shape, boxes) -> np.ndarray:
    count = np.zeros(shape, int)
    for box in boxes:
        view(count, Box.whole(shape), box)[...] += 1
    return count


@given(cases())
def test_intersection_is_what_both_have(case):
    shape, boxes = case
    a, b = boxes[0], boxes[-1]
    both = intersect(a, b)
    expected = (mask(shape, [a]) > 0) & (mask(shape, [b]) > 0)
    assert np.array_equal(mask(shape, [both] if both else []) > 0, expected)
    assert intersect(b, a) == both


@given(cases())
def test_subtraction_leaves_exactly_the_rest_without_overlap(case):
    shape, (box, *others) = case
    rest = subtract(box, others)
    left = mask(shape, rest)
    assert all(each.volume for each in rest)
    assert left.max(initial=0) <= 1
    assert np.array_equal(left > 0, (mask(shape, [box]) > 0) & (mask(shape, others) == 0))


@given(cases(count=1), st.integers(1, 40))
def test_split_yields_small_boxes_in_c_order(case, limit):
    shape, (box,) = case
    array = np.arange(int(np.prod(shape))).reshape(shape)
    whole = Box.whole(shape)
    pieces = list(split(box, limit))
    assert all(0 < piece.volume <= limit for piece in pieces)
    joined = [view(array, whole, piece).ravel() for piece in pieces]
    assert np.array_equal(np.concatenate([*joined, np.array([], int)]), view(array, whole, box).ravel())


@given(st.data())
def test_any_layout_of_holders_feeds_any_layout_of_receivers(data):
    shape = data.draw(SHAPES)
    original = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    whole = Box.whole(shape)
    holders = dict(enumerate(data.draw(shardings(shape))))
    holders = {key: holders[key] for key in data.draw(st.permutations(list(holders)))}
    held = {key: view(original, whole, box).copy() for key, box in holders.items()}
    assembled = np.full(shape, -1, np.int64)
    for wanted in data.draw(shardings(shape)):
        mine = np.full(wanted.extent, -1, np.int64)
        routes, missing = route([wanted], holders)
        assert not missing
        for key, pieces in routes.items():
            for piece in pieces:
                view(mine, wanted, piece)[...] = view(held[key], holders[key], piece)
        view(assembled, whole, wanted)[...] = mine
    assert np.array_equal(assembled, original)


@given(cases(count=6))
def test_routes_are_disjoint_prefer_the_first_and_name_what_nobody_has(case):
    shape, (wanted, *held) = case
    routes, missing = route([wanted], dict(enumerate([*held, None])))
    given_or_missing = [piece for pieces in routes.values() for piece in pieces] + missing
    assert np.array_equal(mask(shape, given_or_missing), mask(shape, [wanted]))
    assert np.array_equal(mask(shape, missing) > 0, (mask(shape, [wanted]) > 0) & (mask(shape, held) == 0))
    for key, pieces in routes.items():
        assert not (mask(shape, pieces) > (mask(shape, [held[key]]) > 0)).any()
        assert not any(intersect(piece, earlier) for piece in pieces for earlier in held[:key])


def test_a_view_never_sticks_out():
    array = np.zeros((2, 3))
    for box in (Box((0, 0), (3, 3)), Box((-1, 0), (1, 1)), Box((0,), (1,)), Box((1, 0), (-1, 3))):
        with pytest.raises(ValueError, match="does not lie inside"):
            view(array, Box.whole((2, 3)), box)


def filled(**boxes: tuple[str, Box]) -> Arena:
    """Return an arena whose tensors hold 1, 2 and so on, in their order."""
    arena = Arena(boxes)
    for number, array in enumerate(arena.arrays.values(), 1):
        array[...] = number
    return arena


PART = Box((2, 0), (2, 3))


def test_the_tensors_of_an_arena_lie_apart_and_aligned_and_are_read_only_for_others():
    boxes = {"a": ("bool", Box((3,), (5,))), "none": ("float32", Box.whole((0, 2))), "b": ("bfloat16", PART)}
    arena = filled(**boxes, c=("float64", Box((), ())))
    assert arena.nbytes == 5 + 0 + 12 + 8
    for number, (name, array) in enumerate(arena.arrays.items(), 1):
        assert (array == number).all(), name
        assert array.ctypes.data % 64 == 0
        assert arena.tensors[name].ctypes.data == array.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        arena.tensors["b"][...] = 9
    assert arena.arrays["b"].dtype == np.uint16


def test_bytes_are_read_from_and_written_to_the_place_of_their_box():
    arena = filled(a=("int32", PART))
    arena.write("a", Box((3, 1), (1, 2)), np.array([[7, 8]], np.int32).data.cast("B"))
    assert arena.arrays["a"].tolist() == [[1, 1, 1], [1, 7, 8]]
    assert np.frombuffer(arena.read("a", Box((2, 1), (2, 1))), np.int32).tolist() == [1, 7]
    assert arena.read("a", PART).readonly
    with pytest.raises(ValueError, match="reshape"):
        arena.write("a", PART, np.zeros(5, np.int32).data.cast("B"))
    for tensor, box, why in (
        ("b", PART, "no tensor 'b' of 2 axes"),
        ("a", Box((2,), (1,)), "no tensor 'a' of 1 axes"),
        ("a", Box((1, 0), (2, 3)), "does not lie inside"),
    ):
        with pytest.raises(StaleHandle, match=why):
            arena.read(tensor, box)


def test_arenas_are_alike_whose_boxes_and_sizes_of_elements_are_the_same():
    arena = filled(a=("int32", PART))
    assert arena.is_like(filled(a=("float32", PART)))
    assert not arena.is_like(filled(a=("bfloat16", PART)))
    assert not arena.is_like(filled(a=("int32", Box((0, 0), (2, 3)))))
    assert not arena.is_like(filled(a=("int32", PART), b=("int32", PART)))


def test_the_hull_is_the_smallest_box_around_all():
    assert hull([Box((4, 1), (1, 2)), Box((2, 2), (1, 5))]) == Box((2, 1), (3, 6))
