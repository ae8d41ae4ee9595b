"""The training transaction: slots, staging, commits, attempts."""

import pytest
from count_work import bytecodes
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import Fenced, Refused
from asyncflow.flow.schedule import VersionWindow
from asyncflow.queue.ledger.events import RankDone
from asyncflow.queue.ledger.log import pack
from asyncflow.queue.protocol.calls import AskSlot
from asyncflow.queue.protocol.messages import StepTotals, TaskSpec
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.partition import Decision, Step
from asyncflow.queue.table.report import snapshot
from asyncflow.queue.table.snapshot import snapshot as records_of
from asyncflow.queue.table.state import Row, RowGroup, RowState

P = "train"
WHOLE = [
    TaskSpec(partition=P, name="make", needs=["prompt"], writes=["advantage"]),
    TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang", order="key"),
]


def make(queue, *, tokens):
    """Complete what is ready for the single task of ``WHOLE``, each sample with its own number of tokens."""
    for row in queue.claim("make", rows=10_000):
        queue.complete([row], "advantage", [{"tokens": tokens(row.meta)}])


def ask(queue, step, slot, *, rank=0, attempt=0, tokens=1000):
    return queue.table.training.slot(
        AskSlot(P, attempt=attempt, step=step, slot=slot, rank=rank, tokens=tokens, wait_s=0)
    )


def train(queue, step, *, world=1, attempt=0, tokens=1000):
    """Run one step; give for each slot the keys of each rank."""
    slots = []
    while True:
        ranks = [ask(queue, step, len(slots), rank=rank, attempt=attempt, tokens=tokens) for rank in range(world)]
        slots.append([[tuple(row.meta.key) for row in rank.rows] for rank in ranks])
        assert len({(rank.last, rank.totals) for rank in ranks}) == 1
        if ranks[0].last:
            break
    for rank in range(world):
        queue.table.training.step_done(P, attempt, step, rank)
    return slots, ranks[0].totals


def flat(slots):
    return [key for slot in slots for rank in slot for key in rank]


def test_a_slot_waits_for_a_group_and_takes_all_that_is_ready(queue):
    queue.table.training.begin(P, 0, 0, 1)
    queue.table.training.open_step(P, 1, 3, 2)
    queue.create(0, 1, 2)
    assert ask(queue, 1, 0) is None
    rows = queue.claim("rollout", rows=2)
    queue.complete(rows, "response")
    queue.complete(queue.claim("score"), "reward")
    queue.complete(queue.claim("advantage"), "advantage")
    first = ask(queue, 1, 0)
    assert [tuple(row.meta.key) for row in first.rows] == [(0, 0), (0, 1)]
    assert (first.last, first.totals) == (False, None)
    queue.through()
    second = ask(queue, 1, 1)
    assert len(second.rows) == 4
    assert second.last
    assert (second.totals.groups, second.totals.samples) == (3, 6)
    assert ask(queue, 1, 0) == first
    with pytest.raises(Refused, match="the last was among them"):
        ask(queue, 1, 2)


def test_loads_of_ranks_are_summed_once_for_each_slot_whose_rows_are_reported():
    task, window = WHOLE[1], VersionWindow(0, 0)
    groups = [RowGroup(P, "train", serial, 1, window) for serial in range(400)]
    rows = [Row(group, 0, group.serial, tokens=1 + group.serial % 7, reported=True) for group in groups]
    rows[6].reported = False
    step = Step(1)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    step.slots = [Decision([[one], [other]], False, StepTotals()) for one, other in pairs]
    for tokens in (rows[6].tokens, 70):
        rows[6].tokens = tokens
        assert step.loads(2, task) == [sum(row.weight for row in rank) for rank in (rows[::2], rows[1::2])]
    rows[6].reported = True
    before = step.loads(2, task)
    step.slots.append(step.slots[0])
    assert bytecodes(lambda: step.loads(2, task)) < 600
    assert step.loads(2, task) == [before[0] + rows[0].weight, before[1] + rows[1].weight]
    step.reset()
    assert step.loads(2, task) == [0, 0]


def test_a_step_is_trained_after_the_one_before(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    training.open_step(P, 1, 1, 2)
    queue.create(0)
    queue.create(1, step=2)
    training.open_step(P, 2, 1, 2)
    queue.through()
    with pytest.raises(Refused, match="cannot be trained now"):
        ask(queue, 2, 0)
    with pytest.raises(Refused, match="no slot 1"):
        ask(queue, 1, 1)
    assert flat(train(queue, 1)[0]) == [(0, 0), (0, 1)]
    assert flat(train(queue, 2)[0]) == [(1, 0), (1, 1)]
    training.commit(P, 0, 1)
    assert queue.counts == {RowState.TRAINED: 2, RowState.BOUND: 2}
    training.commit(P, 0, 2)
    training.commit(P, 0, 2)
    assert queue.counts == {RowState.TRAINED: 4}
    assert len(queue.table.state.to_free) == 4


def test_lowering_a_step_after_its_groups_were_handed_out_ends_it_with_an_empty_slot(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 2)
    training.open_step(P, 1, 2, 2)
    queue.create(0)
    queue.through()
    assert not ask(queue, 1, 0).last
    assert ask(queue, 1, 1) is None
    with pytest.raises(Refused, match="in slots already"):
        training.open_step(P, 1, 0, 2)
    training.open_step(P, 1, 1, 2)
    empty = [ask(queue, 1, 1, rank=rank) for rank in (0, 1)]
    assert [(slot.rows, slot.last) for slot in empty] == [([], True)] * 2
    assert empty[0].totals.samples == 2
    with pytest.raises(Refused, match="in slots already"):
        training.open_step(P, 1, 2, 2)


def test_a_new_attempt_gets_the_same_samples_again_and_the_old_one_is_fenced(make_queue):
    queue = make_queue(WHOLE)
    training = queue.table.training
    training.begin(P, 0, 0, 2)
    training.open_step(P, 1, 4, 3)
    queue.create(*range(4), size=3)
    make(queue, tokens=lambda meta: 1 + meta.serial * 3 + meta.sample)
    first, totals = train(queue, 1, world=2, tokens=20)
    training.begin(P, 1, 0, 2)
    training.begin(P, 1, 0, 2)
    for stale in (lambda: ask(queue, 1, 0), lambda: training.commit(P, 0, 1), lambda: training.begin(P, 0, 0, 2)):
        with pytest.raises(Fenced):
            stale()
    again, totals_again = train(queue, 1, world=2, attempt=1, tokens=20)
    assert again == first
    assert totals_again == totals
    training.begin(P, 2, 1, 2)
    assert queue.counts == {RowState.TRAINED: 12}


def test_weights_that_hold_what_was_never_handed_out_are_refused(queue):
    queue.table.training.open_step(P, 1, 1, 2)
    queue.create(0)
    with pytest.raises(Refused, match="resume from an older checkpoint"):
        queue.table.training.begin(P, 0, 1, 1)


def test_a_trainer_that_crashed_after_its_checkpoint_commits_by_beginning(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 2)
    training.open_step(P, 1, 1, 2)
    queue.create(0)
    queue.through()
    for rank in (0, 1):
        assert ask(queue, 1, 0, rank=rank).last
    training.step_done(P, 0, 1, 0)
    training.begin(P, 1, 1, 2)
    assert queue.counts == {RowState.TRAINED: 2}


def test_resuming_an_older_checkpoint_makes_the_samples_after_it_again(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    for step in (1, 2):
        training.open_step(P, step, 1, 2)
        queue.create(step - 1, step=step, oldest=step - 1, newest=step - 1)
    queue.through()
    train(queue, 1)
    train(queue, 2)
    training.commit(P, 0, 2)
    training.begin(P, 1, 1, 1)
    wanted = queue.table.wanted(P).keys
    assert [(tuple(meta.key), meta.step, meta.min_version, meta.max_version) for meta in wanted] == [
        ((1, 0), 2, 1, 1),
        ((1, 1), 2, 1, 1),
    ]
    assert queue.counts == {RowState.TRAINED: 2, RowState.WANTED: 2}
    assert queue.create_wanted() == [True, True]
    queue.through()
    assert flat(train(queue, 2, attempt=1)[0]) == [(1, 0), (1, 1)]
    training.commit(P, 1, 2)
    assert queue.counts == {RowState.TRAINED: 4}


def test_rows_lost_while_bound_are_wanted_only_when_the_step_is_started_again(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    training.open_step(P, 1, 1, 2)
    training.open_step(P, 2, 1, 2)
    queue.create(0)
    queue.create(1, step=2)
    queue.through()
    train(queue, 1)
    train(queue, 2)
    queue.replace_unit("unit-b")
    assert queue.table.wanted(P).keys == []
    again = QueueState()
    again.replay(records_of(queue.table.state))
    assert again.rows == queue.table.state.rows == {}
    training.commit(P, 0, 1)
    assert queue.counts == {RowState.TRAINED: 2, RowState.BOUND: 2}
    training.begin(P, 1, 1, 1)
    assert queue.counts == {RowState.TRAINED: 2, RowState.WANTED: 2}
    queue.create_wanted()
    queue.through()
    assert flat(train(queue, 2, attempt=1)[0]) == [(1, 0), (1, 1)]


def test_a_slot_says_what_its_rows_are_also_when_they_are_lost(make_queue):
    queue = make_queue(WHOLE)
    queue.table.training.begin(P, 0, 0, 1)
    queue.table.training.open_step(P, 1, 1, 3)
    queue.create(7, size=3, oldest=0, newest=4)
    make(queue, tokens=lambda meta: 1 + meta.sample)
    slot = ask(queue, 1, 0)
    rows = [queue.table.state.rows[row.row] for row in slot.rows]
    assert [(row.meta, row.unit, row.bytes) for row in slot.rows] == [(r.meta, r.unit, r.sizes) for r in rows]
    assert [row.meta.tags for row in slot.rows] == [{"tokens": 1}, {"tokens": 2}, {"tokens": 3}]
    queue.replace_unit("unit-b")
    again = ask(queue, 1, 0)
    assert [(row.row, row.meta.key, row.bytes) for row in again.rows] == [(r.row, r.meta.key, {}) for r in slot.rows]


def test_a_row_that_was_bound_and_lost_is_on_lease_to_nobody(make_queue):
    queue = make_queue([*WHOLE, TaskSpec(partition=P, name="look", needs=["advantage"], lease_s=10)])
    queue.table.training.begin(P, 0, 0, 1)
    queue.table.training.open_step(P, 1, 1, 2)
    queue.create(0)
    make(queue, tokens=lambda meta: 1)
    held = queue.claim("look", rows=1)
    assert len(ask(queue, 1, 0).rows) == 2
    queue.replace_unit("unit-b")
    assert queue.table.claims.expire(1000.0) == 0
    assert queue.table.complete(held[0].lease, [held[0].row], queue.cells(1), None) == [False]
    queue.table.training.begin(P, 1, 0, 1)
    assert queue.counts == {RowState.WANTED: 2}


def test_a_group_that_was_split_over_slots_is_lost_as_a_whole(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    training.open_step(P, 1, 1, 4)
    queue.create(0, size=4)
    queue.through()
    assert len(ask(queue, 1, 0, tokens=2).rows) == 2
    queue.replace_unit("unit-b")
    assert queue.counts == {RowState.BOUND: 4}
    assert len(ask(queue, 1, 1, tokens=2).rows) == 2
    training.begin(P, 1, 0, 1)
    assert queue.counts == {RowState.WANTED: 4}


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_a_step_or_a_trainer_that_cannot_be_is_refused(queue, wrong):
    before = list(queue.events())
    step, groups, size = wrong
    with pytest.raises(Refused, match="samples is not valid"):
        queue.table.training.open_step(P, step, groups, size)
    with pytest.raises(Refused, match="cannot be"):
        queue.table.training.begin(P, step - 1, groups, size)
    assert queue.events() == before


def test_a_partition_without_a_gang_has_no_training(make_queue, tasks):
    queue = make_queue(tasks[:-1])
    training = queue.table.training
    for call in (
        lambda: training.begin(P, 0, 0, 1),
        lambda: ask(queue, 1, 0),
        lambda: training.step_done(P, 0, 1, 0),
        lambda: training.commit(P, 0, 1),
        lambda: training.over(P, 1),
    ):
        with pytest.raises(Refused, match="no gang task is declared"):
            call()


def test_a_step_is_staged_when_all_ranks_have_finished_it_and_not_before_all_its_samples_are_in_slots(queue):
    training, partition = queue.table.training, queue.table.state.partition(P)
    training.begin(P, 0, 0, 2)
    with pytest.raises(Refused, match="not all of its samples"):
        training.step_done(P, 0, 1, 0)
    training.open_step(P, 1, 1, 2)
    queue.create(0)
    queue.through()
    with pytest.raises(Refused, match="not all of its samples"):
        training.step_done(P, 0, 1, 0)
    assert ask(queue, 1, 0).last
    for rank, staged in ((0, 0), (0, 0), (1, 1), (1, 1)):
        training.step_done(P, 0, 1, rank)
        assert snapshot(partition).last_staged_step == staged
    training.commit(P, 0, 1)
    before = list(queue.events())
    training.step_done(P, 0, 1, 0)
    training.commit(P, 0, 1)
    assert queue.events() == before
    assert sum(isinstance(event, RankDone) for event in before) == 2
    for call in (lambda: ask(queue, 1, 0, rank=2), lambda: training.step_done(P, 0, 1, -1)):
        with pytest.raises(Refused, match="in a gang of 2"):
            call()
    with pytest.raises(Refused, match="the step is committed"):
        training.open_step(P, 1, 2, 2)


def test_steps_after_the_last_never_come_unless_they_were_opened(queue):
    training = queue.table.training
    training.open_step(P, 3, 1, 2)
    assert not training.over(P, 1)
    partition = queue.table.state.partition(P)
    assert snapshot(partition).last_staged_step == 0
    training.begin(P, 0, 0, 1)
    assert ask(queue, 1, 0) is None
    for closed in (1, 0):
        queue.table.close(P, closed)
        assert [training.over(P, step) for step in (1, 2, 3, 4)] == [closed == 0, True, False, True]
    queue.table.close(P, 2)
    assert not partition.ended("rollout"), "rows of step 3 may come"
    queue.table.close(P, 3)
    assert partition.ended("rollout")


def test_slots_survive_the_controller(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 2)
    training.open_step(P, 1, 3, 2)
    queue.create(0, 1)
    queue.through()
    before = [ask(queue, 1, 0, rank=rank, tokens=1) for rank in (0, 1)]
    queue.restart(told=False)
    assert [ask(queue, 1, slot, tokens=1) for slot in (0, 1)] == [None, None]
    queue.tell()
    after = [ask(queue, 1, 0, rank=rank, tokens=1) for rank in (0, 1)]
    assert after == before
    assert len(ask(queue, 1, 1, tokens=1).rows) == 1
    queue.create(2)
    queue.through()
    assert len({key for slot in range(3) for rank in (0, 1) for key in _keys(ask(queue, 1, slot, rank=rank, tokens=1))})


def _keys(slot):
    return [tuple(row.meta.key) for row in slot.rows]


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 3),
    budget=st.integers(1, 60),
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=2, max_size=2), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    whole=st.booleans(),
)
def test_every_sample_of_a_step_comes_once_and_slots_keep_the_budget(make_queue, world, budget, lengths, order, whole):
    tasks = [WHOLE[0], WHOLE[1] if whole else TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang")]
    queue = make_queue(tasks)
    training = queue.table.training
    training.begin(P, 0, 0, world)
    training.open_step(P, 1, len(lengths), 2)
    queue.create(*range(len(lengths)), tokens=[number % 3 for number in range(2 * len(lengths))])
    rows = queue.claim("make", rows=1000)
    order.shuffle(rows)
    slots, last = [], False
    while not last:
        ranks = [ask(queue, 1, len(slots), rank=rank, tokens=budget) for rank in range(world)]
        if ranks[0] is None:
            row = rows.pop()
            queue.complete([row], "advantage", [{"tokens": lengths[row.meta.serial][row.meta.sample]}])
            continue
        assert not (whole and rows)
        for rank in ranks:
            load = [row.meta.tokens + row.meta.tags["tokens"] for row in rank.rows]
            assert sum(load) <= budget or len(load) == 1
        slots.append([_keys(rank) for rank in ranks])
        last = ranks[0].last
    assert sorted(flat(slots)) == [(s, j) for s in range(len(lengths)) for j in range(2)]
    assert all(slot != [[]] * world for slot in slots)
    assert ranks[0].totals.response_tokens == sum(map(sum, lengths))
    assert ranks[0].totals.samples == 2 * len(lengths)
    put = {tuple(row.key): row.tokens for row in queue.table.state.rows.values()}
    assert put == {(s, j): (2 * s + j) % 3 for s in range(len(lengths)) for j in range(2)}


@settings(max_examples=20, deadline=None)
@given(first=st.randoms(use_true_random=False), second=st.randoms(use_true_random=False))
def test_whole_steps_do_not_depend_on_the_order_of_arrival(make_queue, first, second):
    def run(order):
        queue = make_queue(WHOLE)
        queue.table.training.begin(P, 0, 0, 2)
        queue.table.training.open_step(P, 1, 5, 2)
        serials = list(range(5))
        order.shuffle(serials)
        for serial in serials:
            queue.create(serial)
        rows = queue.claim("make", rows=100)
        order.shuffle(rows)
        for row in rows:
            queue.complete([row], "advantage", [{"tokens": 1 + (row.meta.serial * 7 + row.meta.sample * 3) % 11}])
        return train(queue, 1, world=2, tokens=15)

    assert run(first) == run(second)


@pytest.mark.parametrize("ready", [False, True])
def test_a_group_that_is_early_takes_the_place_of_one_that_is_late(queue, ready):
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    for step in (1, 2):
        training.open_step(P, step, 2, 2)
    queue.create(0, 1, step=1)
    queue.create(2, 3, step=2)
    if ready:
        queue.through()
    training.exchange(P, 3, 1, 0)
    training.exchange(P, 3, 1, 0)
    queue.through()
    with pytest.raises(Refused, match="group 3 is in step 1"):
        training.exchange(P, 1, 2, 3)
    for other in (1, 2, 3):
        with pytest.raises(Refused, match=f"group 3 is in that step already, but not in place of group {other}"):
            training.exchange(P, 3, 1, other)
    assert [key[0] for key in flat(train(queue, 1)[0])] == [1, 1, 3, 3]
    with pytest.raises(Refused, match="in a slot"):
        training.exchange(P, 2, 1, 3)
    with pytest.raises(Refused, match="have ended"):
        training.exchange(P, 9, 2, 0)
    assert [key[0] for key in flat(train(queue, 2)[0])] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("tag", "counts"),
    [("many", 0), (float("nan"), 0), (-5, 0), (7.0, 7), ((1 << 64) - 1, 1 << 32), (float("inf"), 1 << 32)],
)
def test_a_tag_that_is_no_number_of_tokens_stops_nobody(make_queue, tag, counts):
    queue = make_queue([*WHOLE, TaskSpec(partition=P, name="long", needs=["advantage"], order="longest")])
    queue.table.training.begin(P, 0, 0, 1)
    queue.table.training.open_step(P, 1, 1, 2)
    queue.create(0)
    make(queue, tokens=lambda _: tag)
    assert len(queue.claim("long")) == 2
    _, totals = train(queue, 1)
    assert totals.response_tokens == 2 * counts
    assert all(map(pack, queue.table.state.outbox))
