"""Equal work for all ranks: tokens per optimizer step on lognormal lengths, and what holds whatever the lengths are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.flow.selection import balance
from asyncflow.queue.protocol.calls import AskSlot
from asyncflow.queue.protocol.messages import TaskSpec

P = "train"
MOST_OVER_MEAN = 1.05
TASKS = [
    TaskSpec(partition=P, name="make", needs=["prompt"], writes=["advantage"]),
    TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang", order="key", groups=True),
]


def loads_of(slots, weights):
    return [sum(weights[i] for slot in slots for i in slot[rank]) for rank in range(len(slots[0]))]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.sampled_from([2, 3, 8, 16, 32, 64]),
    groups=st.sampled_from([8, 12, 32]),
    size=st.sampled_from([4, 8, 16]),
    sigma=st.floats(0.3, 1.0),
    slots=st.sampled_from([1, 2, 4, 8]),
)
def test_ranks_have_equal_tokens_in_a_step(seed, ranks, groups, size, sigma, slots):
    lengths = np.random.default_rng(seed).lognormal(7, sigma, (ranks * groups, size)).clip(1, 16_384).astype(int)
    weights = lengths.sum(1).tolist()
    dealt = balance(weights, ranks=ranks, budget=-(-sum(weights) // (ranks * slots)))
    loads = loads_of(dealt, weights)
    assert max(loads) <= MOST_OVER_MEAN * sum(loads) / ranks


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 100))
def test_everything_is_dealt_once_and_slots_keep_the_budget(weights, ranks, budget):
    slots = balance(weights, ranks=ranks, budget=budget)
    assert sorted(i for slot in slots for indices in slot for i in indices) == list(range(len(weights)))
    for slot in slots:
        assert len(slot) == ranks
        assert any(slot)
        for indices in slot:
            assert sum(weights[i] for i in indices) <= budget or len(indices) == 1
    loads = loads_of(slots, weights)
    assert max(loads) - min(loads) <= max(weights)
    assert balance(weights, ranks=ranks, budget=budget) == slots


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_who_had_less_gets_more(before, weights):
    slots = balance(weights, ranks=len(before), budget=10**9, before=before)
    assert len(slots) == 1
    loads = [had + more for had, more in zip(before, loads_of(slots, weights), strict=True)]
    assert max(loads) <= max(*before, (sum(before) + sum(weights)) / len(before) + max(weights))


@pytest.mark.parametrize("world", [2, 8])
def test_a_whole_step_is_dealt_evenly_in_whole_groups(make_queue, world):
    queue, groups, size = make_queue(TASKS), 8 * world, 4
    queue.table.training.begin(P, 0, 0, world)
    queue.table.training.open_step(P, 1, groups, size)
    queue.create(*range(groups), size=size)
    lengths = np.random.default_rng(world).lognormal(5, 0.8, (groups, size)).astype(int) + 1
    for row in queue.claim("make", rows=10_000):
        queue.complete([row], "advantage", [{"tokens": int(lengths[row.meta.serial, row.meta.sample])}])
    budget, loads, places = int(lengths.sum() / world / 3), [0] * world, {}
    slots = iter(range(10_000))
    for number in slots:
        decided = [
            queue.table.training.slot(AskSlot(P, attempt=0, step=1, slot=number, rank=rank, tokens=budget, wait_s=0))
            for rank in range(world)
        ]
        for rank, slot in enumerate(decided):
            loads[rank] += sum(int(row.meta.tags["tokens"]) for row in slot.rows)
            for row in slot.rows:
                places.setdefault(row.meta.serial, set()).add((number, rank))
        if decided[0].last:
            break
    assert all(len(place) == 1 for place in places.values())
    assert len(places) == groups
    assert max(loads) <= MOST_OVER_MEAN * sum(loads) / world


LEAST_OF_THE_SAVING = 0.9


def shared_prompts(order):
    make = TaskSpec(partition=P, name="make", needs=["prompt"], writes=["advantage"], groups=True)
    train = TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang", order=order, shared_tokens=True)
    return [make, train]


@pytest.mark.parametrize(("order", "groups_of_a_rank"), [("key", 2), ("key", 8), ("fifo", 8)])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_groups_that_share_a_prompt_stay_together_within_the_budget(make_queue, order, world, groups_of_a_rank):
    queue, groups, size = make_queue(shared_prompts(order)), groups_of_a_rank * world, 8
    training = queue.table.training
    training.begin(P, 0, 0, world)
    training.open_step(P, 1, groups, size)
    rng = np.random.default_rng(world)
    prompts = rng.lognormal(6, 0.5, groups).astype(int) + 1
    lengths = rng.lognormal(5, 0.8, (groups, size)).astype(int) + 1
    queue.create(*range(groups), size=size, tokens=[int(count) for count in prompts for _ in range(size)])
    budget = int((prompts + lengths.sum(1)).max()) * 2
    loads, places, seen, number = [0] * world, [], [], 0
    while True:
        slots = [
            training.slot(AskSlot(P, attempt=0, step=1, slot=number, rank=rank, tokens=budget, wait_s=0))
            for rank in range(world)
        ]
        if slots[0] is None:
            rows = queue.claim("make", rows=10_000, groups=3)
            queue.complete(
                rows, "advantage", [{"tokens": int(lengths[row.meta.serial, row.meta.sample])} for row in rows]
            )
            continue
        for rank, slot in enumerate(slots):
            keys = [row.meta.key for row in slot.rows]
            together = {key.serial for key in keys}
            load = sum(int(prompts[serial]) for serial in together) + sum(int(lengths[tuple(key)]) for key in keys)
            assert load <= budget
            loads[rank] += load
            places += together
            seen += keys
        number += 1
        if slots[0].last:
            break
    assert sorted(tuple(key) for key in seen) == [
        (serial, sample) for serial in range(groups) for sample in range(size)
    ]
    saved = size * int(prompts.sum()) - sum(int(prompts[serial]) for serial in places)
    assert saved >= LEAST_OF_THE_SAVING * (size - 1) * int(prompts.sum())
    assert max(loads) <= MOST_OVER_MEAN * sum(loads) / world


@pytest.mark.parametrize("order", ["key", "fifo"])
def test_a_group_that_is_too_heavy_for_a_slot_is_cut_and_no_slot_is_above_the_budget(make_queue, order):
    queue, budget, prompt, response = make_queue(shared_prompts(order)), 100, 30, 20
    training = queue.table.training
    training.begin(P, 0, 0, 2)
    training.open_step(P, 1, 2, 8)
    queue.create(0, 1, size=8, tokens=[prompt] * 16)
    rows = queue.claim("make", rows=100)
    queue.complete(rows, "advantage", [{"tokens": response}] * 16)
    parts = []
    for number in range(10):
        slots = [
            training.slot(AskSlot(P, attempt=0, step=1, slot=number, rank=rank, tokens=budget, wait_s=0))
            for rank in range(2)
        ]
        parts += [[row.meta.serial for row in slot.rows] for slot in slots]
        if slots[0].last:
            break
    assert sum(map(len, parts)) == 16
    assert all(prompt * len(set(part)) + response * len(part) <= budget for part in parts)
    assert sum(len(set(part)) for part in parts) == 6


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_dealt_early_and_then_lost_is_given_when_it_was_made_again(make_queue, whole):
    spec = TaskSpec(partition=P, name="train", needs=["prompt"], kind="gang", order="fifo", groups=whole)
    queue = make_queue([spec])
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    training.open_step(P, 1, 8, 2)
    queue.create(*range(8))
    ask = [
        lambda n=n: training.slot(AskSlot(P, attempt=0, step=1, slot=n, rank=0, tokens=2, wait_s=0)) for n in range(20)
    ]
    seen = [row.meta.key for row in ask[0]().rows]
    assert [tuple(key) for key in seen] == [(0, 0), (0, 1)]
    queue.replace_unit("unit-b")
    assert ask[1]() is None
    wanted = queue.table.wanted(P).keys
    assert {meta.serial for meta in wanted} == set(range(1, 8))
    assert all(queue.create_wanted())
    for slot in ask[1:]:
        found = slot()
        seen += [row.meta.key for row in found.rows]
        if found.last:
            break
    assert sorted(seen) == [(serial, sample) for serial in range(8) for sample in range(2)]
