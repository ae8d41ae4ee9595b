"""Optimizer steps as a data set: whole groups, equal micro-batches for all ranks, replay, resumption, an end."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from asyncflow.errors import DeadlineExceeded, Fenced, Refused, StaleHandle  # noqa: E402
from asyncflow.queue.torch import StepDataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

P = "train"
GROUPS, SIZE = 6, 3


@pytest.fixture
def dataset(served):
    made = []

    def make(rank=0, world=1, **options):
        options = {"queue": served.address, "columns": ["prompt"], "tokens": 12, "patience_s": 20.0} | options
        made.append(StepDataset(partition=P, rank=rank, world=world, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fill(served, *steps, close=True):
    for step in steps:
        served.open_step(step, GROUPS, size=SIZE)
        served.fill(range(GROUPS * (step - 1), GROUPS * step), size=SIZE, step=step)
    if close:
        served.close_partition(max(steps))


def loader(dataset, workers=0, **options):
    return DataLoader(dataset, batch_size=None, num_workers=workers, timeout=60 if workers else 0, **options)


def keys(batches):
    return [(batch.step, batch.slot, [tuple(meta.key) for meta in batch.metas]) for batch in batches]


@pytest.mark.parametrize("workers", [0, 4])
def test_ranks_make_the_same_number_of_micro_batches_of_whole_groups(served, dataset, workers):
    fill(served, 1, 2)
    ranks = [dataset(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.begin(step=0, attempt=0)
    batches = [list(loader(rank, workers)) for rank in ranks]
    assert [(b.step, b.slot, b.last) for b in batches[0]] == [(b.step, b.slot, b.last) for b in batches[1]]
    seen = [meta.key for rank in batches for batch in rank for meta in batch.metas]
    assert sorted(seen) == [(s, j) for s in range(2 * GROUPS) for j in range(SIZE)]
    for batch in itertools.chain(*batches):
        samples = [meta.sample for meta in batch.metas]
        assert samples == list(range(SIZE)) * (len(batch) // SIZE)
        assert sum(meta.tokens for meta in batch.metas) <= 12
        for index, meta in enumerate(batch.metas):
            assert batch.columns["prompt"][index].tolist() == [10 * meta.serial + meta.sample] * meta.tokens
    totals = {batch.step: batch.totals for batch in batches[0] if batch.last}
    assert {step: (t.groups, t.samples) for step, t in totals.items()} == dict.fromkeys((1, 2), (GROUPS, GROUPS * SIZE))


def test_a_step_can_be_replayed_until_it_is_committed(served, dataset):
    fill(served, 1, 2)
    data = dataset()
    data.begin()
    first = keys(data)
    data.seek(1, last=1)
    assert keys(data) == keys(loader(data, 2)) == [place for place in first if place[0] == 1]
    data.step_done(1)
    assert keys(data) == []
    data.seek(2)
    assert keys(data) == [place for place in first if place[0] == 2]
    data.commit()
    data.seek(1)
    with pytest.raises(Refused, match="the last committed step is 1"):
        list(data)


def test_workers_that_stay_follow_the_steps(served, dataset):
    fill(served, 1, 2, 3)
    data = dataset()
    data.begin()
    batches = loader(data, 2, persistent_workers=True)
    for step in (1, 2, 3):
        data.seek(step, last=step)
        assert {batch.step for batch in batches} == {step}
        data.step_done(step)
    data.commit()
    assert served.stats().committed == 3 * GROUPS * SIZE


def test_whoever_begins_again_gets_everything_after_its_checkpoint(served, dataset):
    fill(served, 1, 2, 3)
    old = dataset()
    assert old.begin() == 0
    iterator = iter(old)
    place = keys(itertools.takewhile(lambda batch: batch.step < 3, iterator))
    old.step_done(1)
    saved = old.state_dict()
    old.step_done(2)
    new = dataset()
    new.load_state_dict(saved)
    assert new.begin() == 1
    assert served.stats().committed == GROUPS * SIZE
    again = keys(new)
    assert [p for p in again if p[0] == 2] == [p for p in place if p[0] == 2]
    assert {step for step, _, _ in again} == {2, 3}
    with pytest.raises(Fenced, match="attempt 0 is over"):
        old.commit()
    new.step_done(2)
    new.step_done(3)
    new.commit()
    assert served.stats().committed == 3 * GROUPS * SIZE


def test_the_end_is_seen_when_the_partition_is_closed_later(served, dataset):
    fill(served, 1, close=False)
    data = dataset()
    data.begin()
    iterator = iter(data)
    for batch in iterator:
        if batch.last:
            served.close_partition(1)
    assert batch.step == 1


def test_the_next_slot_is_made_while_this_one_is_computed(served, dataset):
    fill(served, 1)
    data = dataset(tokens=6)
    data.begin()
    iterator = iter(data)
    first = next(iterator)
    while served.stats().staged == len(first):
        pass
    second = next(iterator)
    assert len(first) + len(second) <= served.stats().staged < GROUPS * SIZE


def test_samples_that_were_lost_are_named_and_come_after_a_new_beginning(served, dataset):
    fill(served, 1)
    data = dataset()
    data.begin()
    consumer = data._consumer()
    fetch = consumer.client.fetch

    async def fail(rows, columns, *, timeout):
        raise StaleHandle("row 7 was lost", where="unit 0")

    consumer.client.fetch = fail
    with pytest.raises(StaleHandle, match=r"slot 0 of step 1: row 7 was lost\. Storage was lost: begin again"):
        list(data)
    consumer.client.fetch = fetch
    assert data.begin() == 1
    assert sum(len(batch) for batch in data) == GROUPS * SIZE


def test_what_does_not_come_is_named(served, dataset):
    fill(served, 1, close=False)
    data = dataset(patience_s=0.3)
    data.begin()
    with pytest.raises(DeadlineExceeded, match="slot 0 of step 2 was not ready"):
        list(data)


def test_what_cannot_be_is_refused(served, dataset):
    with pytest.raises(Refused, match="no such rank"):
        dataset(2, 2)
    with pytest.raises(Refused, match="has not started"):
        list(dataset())
    with pytest.raises(Refused, match="cannot agree"):
        dataset(0, 2).begin()
    with pytest.raises(Refused, match="no steps from"):
        dataset().seek(3, last=2)
    with pytest.raises(Refused, match="the state is that of"):
        dataset().load_state_dict({"partition": "other", "step": 1})
    with pytest.raises(Refused, match="resume from an older checkpoint"):
        dataset().begin(step=7)
