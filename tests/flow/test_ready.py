"""The index of ready items against a sorted list: whatever comes and goes, the first ones are given first."""

import hypothesis.strategies as st
from hypothesis import given

from asyncflow.flow.ready import ReadyIndex, VersionFilter
from asyncflow.flow.schedule import VersionWindow

windows = st.sampled_from([VersionWindow(0, 0), VersionWindow(0, 2), VersionWindow(1, 3)])
actions = st.sampled_from(["add", "extend", "discard", "discard_all", "take", "each"])


@given(st.lists(st.tuples(actions, st.integers(0, 40), windows, st.integers(0, 3)), max_size=60))
def test_index_agrees_with_a_sorted_list(steps):
    index, model, tick = ReadyIndex[int](), {}, 0
    weights = {}
    for action, item, window, number in steps:
        fits = VersionFilter(number).suits
        fitting = sorted((order, t, i) for i, (order, t, w) in model.items() if fits(w))
        if action == "add":
            tick += 1
            model.setdefault(item, ((number,), tick, window))
            weights[item] = number
            index.add(item, window=window, order=(number,), weight=number)
        elif action == "extend":
            fresh = [item + 100 * (tick + 1) + k for k in range(number)]
            for k, one in enumerate(fresh, tick + 1):
                model[one] = ((1,), k, window)
            tick += len(fresh)
            weights |= dict.fromkeys(fresh, 1)
            index.extend(fresh, window=window, order=(1,))
        elif action == "discard_all":
            gone = [*list(model)[number::2], item]
            index.discard_all(gone)
            model = {one: place for one, place in model.items() if one not in gone}
        elif action == "discard":
            model.pop(item, None)
            index.discard(item)
        elif action == "take":
            taken = index.take(fits, number)
            assert taken == [i for _, _, i in fitting[:number]]
            for one in taken:
                del model[one]
        else:
            assert list(index.each(fits)) == [i for _, _, i in fitting]
            assert index.fitting(fits) == len(fitting)
        for each in {w for _, _, w in model.values()}:
            held = sorted((o, t, i) for i, (o, t, w) in model.items() if w == each)
            assert list(index.in_order(each)) == [i for _, _, i in held]
            assert index.count(each) == len(held)
        for shelf in index._shelves.values():
            assert shelf.count + shelf.stale == sum(len(run[2]) for run in shelf.runs)
        assert set(index) == set(model)
        assert len(index) == len(model)
        assert index.weight == sum(weights[one] for one in model)


def test_what_was_taken_is_forgotten():
    index, window = ReadyIndex[int](), VersionWindow(0, 0)
    for start in range(0, 10_000, 10):
        index.extend(range(start, start + 10), window=window, order=(0,))
        assert index.take(lambda _: True, 9)[-1] - start < 10
    shelf = index._shelves[window]
    assert shelf.stale + len(shelf.runs) <= 2 * len(index) + 100
