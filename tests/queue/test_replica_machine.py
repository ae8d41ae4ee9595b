"""A replica follows a primary to which anything may happen, in any order, and itself restarts and falls behind.

The primaries are those of the other two machines. What is asked of the replica: when it has caught up it has the
primary's rows; its own task has every row once, whatever the primary did; its ledger makes the same state again, and
its audit agrees.
"""

import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.audit import Auditor
from asyncflow.queue.protocol.calls import ClaimRows
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.replication import ChangeFeed, decode, install, take
from asyncflow.queue.table.snapshot import snapshot, snapshot_rows
from asyncflow.queue.table.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from test_machine import QueueMachine
from test_open_machine import OpenMachine

TASK = "away"


class Replica:
    """A replica's state, its ledger, and how far it has followed."""

    def __init__(self):
        self.log, self.primary, self.position = [], 0, 0
        self.start()

    def start(self):
        self.write()
        self.table = Table(index=1, controllers=2)
        for event in self.log:
            self.table.state.apply(event)
        self.table.start(0.0)
        self.primary = self.position = 0

    def write(self):
        if hasattr(self, "table"):
            self.log += self.table.state.outbox
            self.table.state.outbox.clear()

    def follow(self, feed):
        while (told := feed.answer(self.primary, self.position)) is not None:
            state = QueueState(1) if told.snapshot else self.table.state
            for raw in told.items:
                take(state, decode(raw))
            if told.snapshot:
                install(self.table.state, state)
                self.table.state.outbox.clear()
                self.log = list(snapshot(self.table.state))
            self.primary, self.position = told.epoch, told.position


class Followed:
    """The replica that a machine keeps. primary: the table of that machine; away: it does not follow just now."""

    replica = None
    feed = None

    def attend(self):
        if self.feed is None or self.feed._state is not self.primary.state:
            self.feed, self.told_of = ChangeFeed(self.primary.state, limit=1500), set()
            self.feed.start()
            spec = TaskSpec(partition=self.partition_name, name=TASK, needs=[self.column])
            if TASK not in self.primary.state.partition(self.partition_name).elsewhere:
                self.primary.state.record(ev.Declared(spec, 1))
        if self.replica is None:
            self.replica, self.tickets_of_replica, self.batches, self.finished = Replica(), 0, [], set()
            self.away = False

    def catch_up(self):
        self.attend()
        fresh = [number for number in self.primary.state.rows if number not in self.told_of]
        self.told_of.update(fresh)
        for number in fresh:
            self.primary.state.rows[number].reported = True
        self.feed.held(fresh)
        self.replica.follow(self.feed)

    @invariant()
    def a_replica_that_follows_has_the_rows_of_the_primary(self):
        self.attend()
        if self.away:
            return
        self.catch_up()

        assert list(snapshot_rows(self.replica.table.state)) == list(snapshot_rows(self.primary.state))

    @rule(away=st.booleans())
    def stop_or_go_on(self, away):
        self.away = away

    @rule()
    def restart_replica(self):
        self.attend()
        self.replica.start()

    @rule(most=st.integers(1, 4), then=st.sampled_from(["hold", "complete", "return", "restart"]))
    def claim_at_replica(self, most, then):
        self.catch_up()
        self.tickets_of_replica += 1
        claim = ClaimRows(self.partition_name, TASK, "w", f"s{self.tickets_of_replica}", max_rows=most)
        batch = self.replica.table.claims.grant(claim, 0.0)
        if not batch:
            return
        assert self.finished.isdisjoint(row.row for row in batch)
        self.batches.append(batch)
        if then != "hold":
            self.end_batch(batch, good=then != "return")
        if then == "restart":
            self.replica.start()

    @rule(data=st.data(), good=st.booleans())
    def end_at_replica(self, data, good):
        if getattr(self, "batches", None):
            self.end_batch(data.draw(st.sampled_from(self.batches)), good=good)

    def end_batch(self, batch, *, good):
        claims, name, numbers = self.replica.table.claims, batch[0].lease, [row.row for row in batch]
        lease = claims.holder(name)
        held = [lease is not None and number in lease.rows for number in numbers]
        if not good:
            assert claims.give_back(name, numbers, "test") == held
            return
        done = claims.completed(name, numbers)
        ok = self.replica.table.complete(name, numbers, Cells(dtypes={}, sizes={}), [])
        assert ok == [a or number in done for a, number in zip(held, numbers, strict=True)]
        self.finished.update(number for number, admitted in zip(numbers, ok, strict=True) if admitted)

    def teardown(self):
        super().teardown()
        if self.replica is None:
            return
        self.catch_up()
        batch = True
        while batch:
            self.tickets_of_replica += 1
            claim = ClaimRows(self.partition_name, TASK, "w", f"s{self.tickets_of_replica}", max_rows=100)
            if batch := self.replica.table.claims.grant(claim, 0.0):
                assert self.finished.isdisjoint(row.row for row in batch)
                self.batches.append(batch)
        for batch in self.batches:
            self.replica.table.claims.complete(batch[0].lease, [row.row for row in batch])
        partition = self.replica.table.state.partition(self.partition_name)
        living = [row for group in partition.groups.values() for row in group.rows if row.state == 0]
        assert all(row.work[TASK].done for row in living)
        self.replica.write()
        again, auditor = QueueState(1), Auditor()
        for event in self.replica.log:
            again.apply(event)
            auditor.see(event)
        assert list(snapshot(again)) == list(snapshot(self.replica.table.state))
        assert not auditor.report().problems


class FollowedOpen(Followed, OpenMachine):
    partition_name, column = "scores", "text"

    @property
    def primary(self):
        return self.table

    @rule(data=st.data())
    def lose_some_rows(self, data):
        lost = [number for number in self.some(data) if number in self.rows]
        self.table.lose_rows(lost)
        self.lost |= {number: self.rows.pop(number) for number in lost}


class FollowedTraining(Followed, QueueMachine):
    partition_name, column = "train", "prompt"

    @property
    def primary(self):
        return self.queue.table


@pytest.mark.parametrize("machine", [FollowedOpen, FollowedTraining])
def test_a_replica_has_the_rows_of_its_primary_whatever_happens(machine, make_queue):
    machine.make_queue = make_queue
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=HealthCheck,
        ),
    )
