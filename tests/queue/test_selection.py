from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.ready import ReadyIndex, VersionFilter
from asyncflow.flow.schedule import VersionWindow

windows = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda ends: VersionWindow(min(ends), max(ends)))


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "head"]), st.integers(0, 9), windows, st.integers(0, 5))))
def test_index_agrees_with_a_sorted_list(steps):
    index = ReadyIndex[int]()
    model = {}
    for tick, (action, item, window, order) in enumerate(steps):
        if action == "add" and item not in model:
            model[item] = (order, tick, window)
            index.add(item, window=window, order=(order,))
        elif action == "discard":
            model.pop(item, None)
            index.discard(item)
        else:
            version_filter = VersionFilter(item % 4)
            fitting = [(o, t, i) for i, (o, t, w) in model.items() if version_filter.suits(w)]
            assert index.head(version_filter.suits) == (min(fitting)[2] if fitting else None)
        assert len(index) == len(model)
        assert all(index.count(w) == sum(m[2] == w for m in model.values()) for w in {m[2] for m in model.values()})


def test_index_forgets_what_was_discarded():
    index = ReadyIndex[int]()
    for number in range(10_000):
        index.add(number, window=VersionWindow(0, 0), order=(0,))
        if number:
            index.discard(number)
    assert len(index) == 1
    assert sum(shelf.stale + len(shelf.runs) for shelf in index._shelves.values()) < 300


def test_an_item_keeps_its_place_but_not_its_weight():
    index = ReadyIndex[str]()
    index.add("a", window=VersionWindow(0, 0), order=(0,), weight=3)
    index.add("b", window=VersionWindow(0, 0), order=(0,), weight=1)
    index.add("a", window=VersionWindow(0, 0), order=(9,), weight=5)
    assert index.weight == 6
    assert index.head(lambda _: True) == "a"


def test_version_filter():
    assert VersionFilter().suits(VersionWindow(7, 7))
    assert [VersionFilter(2).suits(VersionWindow(1, newest)) for newest in (1, 2, 3)] == [False, True, True]
    assert [VersionFilter(2).suits(VersionWindow(oldest, 3)) for oldest in (1, 2, 3)] == [True, True, False]
    assert VersionFilter(2, (3,)).accepts(VersionWindow(3, 3))
    assert not VersionFilter(2, (4,)).accepts(VersionWindow(3, 3))
