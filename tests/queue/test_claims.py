"""Claims of open rows: how few and how many, their completion, the end of a partition, keys of lost rows."""

import msgspec
import pytest

from asyncflow.errors import PeerLost, ProtocolError, Refused, StaleHandle
from asyncflow.identity import RowPlace, location_at
from asyncflow.queue.ledger.audit import Auditor
from asyncflow.queue.ledger.events import MOST_REASONS, OTHER_REASON, RowsPut
from asyncflow.queue.protocol.calls import ClaimRows
from asyncflow.queue.protocol.messages import KEY_TAG, Samples, TaskSpec
from asyncflow.queue.protocol.unit_calls import Cells, NewRows
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.rows import put, write
from asyncflow.queue.table.snapshot import snapshot
from asyncflow.queue.table.state import RowState
from asyncflow.queue.table.table import Table

P = "open"
CLIENT = b"a client"
FIRST = 1 << 32
"""The serial of its first group."""
NO_CELLS = Cells(dtypes={}, sizes={})


def ids(leased):
    return [row.row for row in leased]


class Rows:
    """A table with one unit and open rows in it."""

    def __init__(self, *specs):
        self.table = Table()
        self.table.start(0.0)
        self.table.declare([TaskSpec(partition=P, name=name, needs=["x"], **spec) for name, spec in specs])
        self.epoch = self.table.join_unit(0, "unit")
        self.put_so_far = 0

    def put(self, count, *, size=1, tags=(), client=CLIENT, group=None):
        first = RowPlace(self.epoch, 0, self.put_so_far).row
        group = self.put_so_far if group is None else group
        self.put_so_far += count
        numbers = list(range(first, first + count))
        cells = Cells(dtypes={"x": "int64"}, sizes={"x": [8] * count})
        _, rows = put(self.table.state, NewRows(P, client, group, size, numbers, cells, list(tags)))
        return list(rows)

    def claim(self, task="t", worker="w", **options):
        ticket = f"{worker}{len(self.table.state.outbox)}"
        return self.table.claims.grant(ClaimRows(P, task, worker, ticket, **options), 0.0)

    def complete(self, leased, *, table=None):
        """Say that a lease is done; tell what is said of each of its rows."""
        return (table or self.table).complete(leased[0].lease, ids(leased), NO_CELLS, None)

    @property
    def partition(self):
        return self.table.state.partitions[P]


def test_a_claim_gets_at_least_what_it_asks_for_or_nothing():
    rows = Rows(("t", {}))
    put = rows.put(5)
    assert rows.claim(max_rows=9, min_rows=6) == []
    assert rows.claim(max_rows=10**7, min_rows=10**7) == []
    assert ids(rows.claim(max_rows=3, min_rows=3)) == put[:3]
    assert ids(rows.claim(max_rows=9, min_rows=2)) == put[3:]


def test_a_claim_of_rows_gets_those_of_so_many_groups():
    rows = Rows(("t", {}))
    put = rows.put(8, size=2)
    assert rows.claim(max_rows=9, max_groups=1, min_rows=3) == []
    assert ids(rows.claim(max_rows=9, max_groups=2)) == put[:4]
    assert ids(rows.claim(max_rows=3, max_groups=2)) == put[4:7]


def test_a_claim_of_whole_groups_gets_at_least_what_it_asks_for():
    rows = Rows(("t", {"groups": True}))
    put = rows.put(6, size=2)
    assert rows.claim(max_rows=5, min_rows=5) == []
    assert ids(rows.claim(max_rows=5, min_rows=4)) == put[:4]
    assert ids(rows.claim(max_rows=1)) == put[4:]


def test_rows_are_completed_as_often_as_asked():
    rows = Rows(("t", {}), ("writer", {"writes": ["y"]}))
    rows.put(4)
    batch, other = rows.claim(max_rows=2), rows.claim(max_rows=2)
    assert rows.complete(batch) == rows.complete(batch) == [True, True]
    assert rows.table.complete("ffff", ids(batch), NO_CELLS, None) == [False, False]
    rows.table.claims.expire(100.0)
    assert rows.complete(other) == [False, False]
    assert ids(rows.claim(max_rows=9)) == ids(other)
    with pytest.raises(Refused, match="writes"):
        rows.complete(rows.claim("writer"))


@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_completed_and_cleared_is_known_after_a_restart(compacted):
    rows = Rows(("t", {"clears": True}))
    rows.put(2)
    batch = rows.claim(max_rows=2)
    assert rows.complete(batch) == rows.complete(batch) == [True, True]
    again = Table()
    for event in snapshot(rows.table.state) if compacted else rows.table.state.outbox:
        again.state.apply(event)
    assert rows.complete(batch, table=again) == [True, True]


def test_rows_that_a_lease_gave_back_are_not_completed_by_it_after_a_restart_either():
    rows = Rows(("t", {"clears": True}))
    put = rows.put(3)
    batch = rows.claim(max_rows=3)
    rows.table.claims.give_back(batch[0].lease, put[:1], "test")
    again = Table()
    again.state.replay(snapshot(rows.table.state))
    assert rows.complete(batch) == [False, True, True]
    assert rows.complete(batch, table=again) == [False, True, True]
    assert list(snapshot(again.state)) == list(snapshot(rows.table.state))


def test_rows_that_were_dropped_from_a_group_are_counted_once_by_the_audit_of_a_snapshot():
    rows = Rows(("t", {}))
    put = rows.put(6, size=3)
    batch = rows.claim(max_rows=4)
    rows.table.claims.drop(batch[0].lease, put[:1], "filtered:test")
    rows.table.claims.drop(batch[0].lease, put[3:4], "test")
    rows.table.clear_rows(P, put[4:])
    reports = []
    for events in (rows.table.state.outbox, snapshot(rows.table.state)):
        auditor = Auditor()
        for event in events:
            auditor.see(event)
        reports.append(auditor.report())
    again = QueueState()
    again.replay(snapshot(rows.table.state))
    assert list(snapshot(again)) == list(snapshot(rows.table.state))
    assert reports[0] == reports[1]
    assert (reports[0].put, reports[0].cleared, reports[0].remaining, reports[0].ok) == (6, 4, 2, True)


def test_a_task_that_clears_what_it_completes_writes_nothing():
    rows = Rows(("t", {"clears": True}))
    (put,) = rows.put(1)
    (held,) = rows.claim(max_rows=1)
    with pytest.raises(Refused, match="so it writes nothing"):
        rows.table.complete(held.lease, [put], Cells(dtypes={"y": "int64"}, sizes={"y": [8]}), None)
    assert rows.complete([held]) == [True]


def test_a_completion_replaces_a_column_that_was_written_meanwhile_and_comes_again_for_nothing():
    rows = Rows(("writer", {"writes": ["y"]}))
    (put,) = rows.put(1)
    (held,) = rows.claim("writer", max_rows=1)
    sized = [Cells(dtypes={"y": "int64"}, sizes={"y": [size]}) for size in (8, 16, 24)]
    assert write(rows.table.state, [put], sized[0], []) == [True]
    for cells in sized[1:]:
        assert rows.table.complete(held.lease, [put], cells, None) == [True]
        assert rows.table.state.rows[put].columns["y"] == 16


def test_clearing_an_empty_partition_opens_it_again():
    rows = Rows(("t", {}))
    rows.table.close(P, 0)
    rows.table.clear(P)
    assert len(rows.put(1)) == 1


def test_a_task_that_clears_leaves_nothing_of_its_rows():
    rows = Rows(("t", {"clears": True}), ("u", {}))
    put = rows.put(6, size=2)
    batch = rows.claim(max_rows=3)
    held = rows.claim("u", max_rows=6)
    rows.complete(batch)
    assert [row.row for row in rows.table.state.to_free] == put[:3]
    assert rows.table.state.rows.keys() == set(put[3:])
    assert [len(group.rows) for group in rows.partition.groups.values()] == [2, 2]
    assert rows.partition.cleared == 3
    assert rows.partition.counts.total() == 3
    assert rows.table.claims.complete(held[0].lease, put) == [False] * 3 + [True] * 3
    rows.complete(rows.claim(max_rows=9))
    assert not rows.partition.groups
    assert len(rows.partition.finished) == 0
    assert rows.put(2, group=0) == [0, 0]


def test_nobody_is_told_of_the_end_while_others_hold_rows_if_it_asks_so():
    rows = Rows(("t", {}))
    rows.put(3)
    mine, other = rows.claim(worker="me", max_rows=1), rows.claim(worker="other", max_rows=2)
    patient = ClaimRows(P, "t", "me", "next", until_done=True)
    hasty = ClaimRows(P, "t", "me", "next")
    ended = rows.table.claims.ended
    assert not ended(hasty)
    rows.table.close(P, 0)
    assert ended(hasty)
    assert not ended(patient)
    rows.complete(other)
    assert ended(patient)
    rows.table.give_back(mine[0].lease, ids(mine), "test")
    assert not ended(hasty)
    rows.table.clear_rows(P, ids(mine) + ids(other))
    assert ended(patient)
    assert ended(ClaimRows(P, "a task that nobody declared", "me", "next", until_done=True))


def test_a_key_of_a_lost_row_makes_it_again_under_its_own_serial():
    rows = Rows(("t", {}))
    (first,) = rows.put(1, tags=[{KEY_TAG: "a"}])
    rows.table.lose_rows([first])
    assert rows.partition.counts[RowState.WANTED] == 1
    (again,) = rows.put(1, tags=[{KEY_TAG: "a"}])
    assert rows.partition.groups.keys() == {FIRST}
    assert ids(rows.claim(max_rows=9)) == [again]
    assert not rows.partition.wanted


def test_of_rows_that_are_put_together_those_are_new_whose_keys_are():
    rows = Rows(("t", {}))
    (none,) = rows.put(1, tags=[{KEY_TAG: "None"}])
    put = rows.put(4, tags=[{KEY_TAG: "b"}, {KEY_TAG: "None"}, {}, {KEY_TAG: "c"}])
    assert put == [none + 1, none, none + 3, none + 4]
    assert ids(rows.claim(max_rows=9)) == [none, none + 1, none + 3, none + 4]
    rows.table.lose_rows([none])
    assert rows.put(2, size=2, tags=[{KEY_TAG: "None"}, {KEY_TAG: "d"}]) == [0, 0], "groups are made whole"
    assert [row.row for row in rows.partition.wanted] == [none]


def test_a_put_that_comes_again_makes_its_lost_rows_and_changes_no_other():
    rows = Rows(("writer", {"writes": ["y"]}))
    first, second = rows.put(2)
    held = rows.claim("writer", max_rows=1)
    cells = Cells(dtypes={"y": "int64"}, sizes={"y": [8]})
    assert rows.table.complete(held[0].lease, [first], cells, [{"n": 1}]) == [True]
    rows.table.lose_rows([second])
    rows.put_so_far = 0
    assert rows.put(2) == [first, second]
    there = rows.table.state.rows
    assert {number: (row.columns, row.tags) for number, row in there.items()} == {
        first: ({"x": 8, "y": 8}, {"n": 1}),
        second: ({"x": 8}, {}),
    }


def test_what_may_not_be_written_without_a_lease_is_refused_and_leaves_nothing_behind():
    rows = Rows(("t", {}))
    (mine, keyed) = rows.put(2, tags=[{}, {KEY_TAG: "a"}])
    cells = Cells(dtypes={"x": "int64"}, sizes={"x": [8, 8]})
    numbers = [RowPlace(rows.epoch, 0, 10 + index).row for index in range(3)]
    for name, samples, number in (("other", None, 0), ("train", Samples(serials=[0], step=1), 1)):
        one = Cells(dtypes={"x": "int64"}, sizes={"x": [8]})
        put(rows.table.state, NewRows(name, CLIENT, 0, 1, [numbers[number]], one, [], samples))
    before = list(rows.table.state.outbox)
    for those, tags, error, what in (
        ([mine, numbers[0]], [], Refused, "one write goes to one partition"),
        ([numbers[1]] * 2, [], Refused, "under a lease only"),
        ([mine, keyed], [{"n": 1}, {KEY_TAG: "b"}], Refused, "is the row's fixed key"),
        ([mine, numbers[2]], [], StaleHandle, f"queue: there is no row {numbers[2]}"),
    ):
        with pytest.raises(error, match=what):
            write(rows.table.state, those, cells, tags)
    held = rows.claim(max_rows=2)
    with pytest.raises(Refused, match="is the row's fixed key"):
        rows.table.complete(held[0].lease, [mine, keyed], NO_CELLS, [{}, {KEY_TAG: "b"}])
    assert [event for event in rows.table.state.outbox if event not in before] == [rows.table.state.outbox[-1]]
    assert [row.tags for row in rows.table.state.rows.values()][:2] == [{}, {KEY_TAG: "a"}]


def test_reasons_for_which_rows_came_back_are_counted_apart_up_to_a_number_of_them():
    rows = Rows(("t", {}))
    rows.put(1)
    reasons = [f"reason {number}" for number in range(MOST_REASONS + 2)] + ["reason 0"]
    for reason in reasons:
        (row,) = rows.claim(max_rows=1)
        rows.table.give_back(row.lease, [row.row], reason)
    expected = dict.fromkeys(reasons[:MOST_REASONS], 1) | {"reason 0": 2, OTHER_REASON: 2}
    assert rows.partition.returned == expected
    for events in (rows.table.state.outbox, snapshot(rows.table.state)):
        auditor, again = Auditor(), QueueState()
        for event in events:
            auditor.see(event)
            again.apply(event)
        assert again.partitions[P].returned == expected
        assert auditor.report().redeliveries == MOST_REASONS + 3
        assert auditor.report().reasons.items() <= expected.items()
        assert auditor.report().reasons[OTHER_REASON] == 2


def test_a_closed_partition_gets_no_row_but_those_that_were_lost():
    rows = Rows(("t", {}))
    (first,) = rows.put(1, tags=[{KEY_TAG: "a"}])
    rows.table.close(P, 0)
    rows.table.lose_rows([first])
    with pytest.raises(Refused, match="the partition is closed"):
        rows.put(1, tags=[{KEY_TAG: "b"}])
    (again,) = rows.put(1, tags=[{KEY_TAG: "a"}])
    assert rows.table.state.rows.keys() == {again}


@pytest.mark.parametrize("then", ["told", "lost"])
def test_keys_wait_until_the_units_have_spoken_or_are_lost(then):
    rows = Rows(("t", {}))
    rows.put(1, tags=[{KEY_TAG: "a"}])
    again = Rows()
    table = Table()
    table.state.replay(rows.table.state.outbox)
    table.start(0.0)
    again.table, again.epoch, again.put_so_far = table, rows.epoch, 10
    with pytest.raises(PeerLost, match="not yet reported"):
        again.put(1, tags=[{KEY_TAG: "a"}])
    assert len(again.put(1)) == 1
    if then == "told":
        table.miss(location_at(rows.epoch, 0))
    else:
        table.lose_unit(0)
        again.epoch = table.join_unit(0, "another")
    assert len(again.put(1, tags=[{KEY_TAG: "a"}])) == 1


def test_a_compacted_ledger_makes_the_same_rows_and_what_tasks_have_done_with_them():
    rows = Rows(("t", {}))
    rows.put(1000)
    for _ in range(10):
        rows.complete(rows.claim(max_rows=16))
    events = list(snapshot(rows.table.state))
    again = QueueState()
    again.replay(events)
    assert list(snapshot(again)) == events
    assert again.partitions[P].queues["t"].busy == rows.partition.queues["t"].busy == 160


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"cells": Cells(dtypes={"x": "int64"}, sizes={"x": [8] * 3})}, ProtocolError),
        ({"samples": Samples(serials=[0, 1], step=1, tokens=[1])}, Refused),
        ({"tags": [{}]}, Refused),
        ({"samples": Samples(serials=[0, 0], step=1)}, Refused),
        ({"samples": Samples(serials=[0, -1], step=1)}, Refused),
        ({"samples": Samples(serials=[0], step=1)}, Refused),
        ({"group": (1 << 32) - 1}, Refused),
        ({"group_size": 3}, Refused),
        ({"rows": [], "cells": NO_CELLS, "samples": Samples(serials=[], step=1)}, Refused),
        ({"tags": [{KEY_TAG: 7}, {}]}, Refused),
        ({"tags": [{KEY_TAG: ""}, {}]}, Refused),
        ({"tags": [{KEY_TAG: "a"}] * 2}, Refused),
    ],
)
def test_a_put_that_is_refused_leaves_nothing_behind(wrong, error):
    rows = Rows(("t", {}))
    before = list(rows.table.state.outbox)
    first = RowPlace(rows.epoch, 0, 0).row
    cells = Cells(dtypes={"x": "int64"}, sizes={"x": [8, 8]})
    entry = NewRows(P, CLIENT, 0, 1, [first, first + 1], cells, [])
    with pytest.raises(error):
        put(rows.table.state, msgspec.structs.replace(entry, **wrong))
    assert rows.table.state.outbox == before
    assert not rows.table.state.rows


def test_a_put_is_one_event_whatever_its_serials(queue):
    queue.create(0, 1, 3, step=1)
    queue.create(3, 4, step=2)
    puts = [event for event in queue.events() if isinstance(event, RowsPut)]
    assert [(put.serials, put.size, put.step) for put in puts] == [([0, 1, 3], 2, 1), ([4], 2, 2)]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_lease_is_of_no_use_under_the_name_of_another_process(restarted):
    rows = Rows(("t", {}), ("writer", {"writes": ["y"]}))
    put = rows.put(2)
    held, worked = rows.claim(worker="rollout-1-a"), rows.claim("writer", worker="rollout-1-a", max_rows=2)
    cells, table = Cells(dtypes={"y": "int64"}, sizes={"y": [8, 8]}), rows.table
    stolen = {lease: f"{lease.partition('@')[0]}@rollout-2" for lease in (held[0].lease, worked[0].lease)}
    assert held[0].lease.endswith("@rollout-1")
    assert table.complete(stolen[worked[0].lease], put, cells, None) == [False, False]
    assert table.complete(worked[0].lease, put, cells, None) == [True, True]
    if restarted:
        events = list(snapshot(table.state))
        table = Table()
        table.state.replay(events)
        assert list(snapshot(table.state)) == events
    assert table.complete(stolen[worked[0].lease], put, cells, None) == [False, False]
    assert table.complete(worked[0].lease, put, cells, None) == [True, True]
    for theft in (held[0].lease.partition("@")[0], stolen[held[0].lease]):
        claims = table.claims
        assert claims.renew([theft], 1.0) == []
        assert table.complete(theft, put[:1], NO_CELLS, None) == [False]
        assert claims.drop(theft, put, "filtered:test") == [False, False]
        assert claims.give_back(theft, put, "test") == [False, False]
    assert table.claims.renew([held[0].lease], 1.0) == [held[0].lease]
