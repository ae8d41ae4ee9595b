"""Anything may happen in any order: the pure table against a model, and against its own log.

The trainer here is the counting trainer of the design: its weights are the samples they were trained on, and they pass
through checkpoints. After any history, finishing the run must leave each sample in the weights exactly once, unless it
was filtered.
"""

from collections import Counter

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncflow.errors import Fenced, Refused
from asyncflow.queue.ledger.audit import Auditor
from asyncflow.queue.protocol.calls import AskSlot
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.replication import decode, encode
from asyncflow.queue.table.snapshot import snapshot
from asyncflow.queue.table.state import RowState

P = "train"
STEPS, GROUPS, SIZE = 3, 2, 2
SERIALS = STEPS * GROUPS
WRITES = {"rollout": "response", "score": "reward", "advantage": "advantage"}
TASK = st.sampled_from(sorted(WRITES))
ASIDE = [
    TaskSpec(partition=P, name="look", needs=["advantage"], lease_s=10),
    TaskSpec(partition=P, name="compare", needs=["advantage"], groups=True, lease_s=10),
]
"""They write nothing, and have rows on lease when the trainer gets them."""


class QueueMachine(RuleBasedStateMachine):
    make_queue = None

    @initialize()
    def start(self):
        self.queue = type(self).make_queue()
        self.now = 0.0
        self.leases = []
        self.created = set()
        self.steps = {serial: 1 + serial // GROUPS for serial in range(SERIALS)}
        self.filtered = set()
        self.groups = dict.fromkeys(range(1, STEPS + 1), GROUPS)
        self.attempt, self.step, self.slot = -1, 1, 0
        self.weights = {0: Counter()}
        self.checkpoint = 0
        self.partial = Counter()
        self.units = 0
        for step, groups in self.groups.items():
            self.queue.table.training.open_step(P, step, groups, SIZE)

    # --- data

    def step_of(self, serial):
        return self.steps[serial]

    @rule(early=st.integers(0, SERIALS - 1), late=st.integers(0, SERIALS - 1))
    def exchange(self, early, late):
        step, own = self.steps[late], self.steps[early]
        partition = self.queue.table.state.partitions[P]
        bound = {serial for step in partition.gang.steps.values() for serial in step.bound}
        there = {early, late} <= partition.groups.keys()
        if there and step != own and not bound & {early, late}:
            self.queue.table.training.exchange(P, early, step, late)
            self.steps[early], self.steps[late] = step, own
            self.queue.table.training.exchange(P, early, step, late)
        elif not there or step != own or partition.groups[early].instead_of != late:
            with pytest.raises(Refused):
                self.queue.table.training.exchange(P, early, step, late)

    @rule(serial=st.integers(0, SERIALS - 1))
    def create(self, serial):
        wanted = {meta.serial for meta in self.queue.table.wanted(P).keys}
        fresh = serial not in {key[0] for key in self.created}
        if fresh or serial in wanted:
            gone = self.queue.table.state.partitions[P].groups.get(serial)
            old = [row.sample for row in gone.rows if row.state is RowState.WANTED] if gone else range(SIZE)
            verdicts = self.queue.create(serial, size=SIZE, step=self.step_of(serial))
            assert verdicts == [sample in old for sample in range(SIZE)]
            self.created |= {(serial, sample) for sample in range(SIZE)}
        else:
            assert not any(self.queue.create(serial, size=SIZE, step=self.step_of(serial)))

    @rule(upto=st.sampled_from([*WRITES, "advantage"]), filtering=st.booleans())
    def make_progress(self, upto, filtering):
        for serial in range(min(SERIALS, len(self.created) // SIZE + 2)):
            self.create(serial)
        for task, column in WRITES.items():
            rows = self.queue.claim(task, rows=100, now=self.now)
            if rows:
                self.leases.append((task, rows))
                if task == "advantage" and filtering:
                    self.filter([row for row in rows if row.meta.serial % 2])
                expected = [self.in_force(task, row) for row in rows]
                assert self.queue.complete(rows, column) == expected
            if task == upto:
                break

    @precondition(lambda self: self.attempt >= 0)
    @rule(slots=st.integers(1, 6), tokens=st.integers(1, 9), saving=st.booleans())
    def train_on(self, slots, tokens, saving):
        for _ in range(slots):
            if self.step <= STEPS:
                self.train(tokens=tokens)
        if saving and self.step > 1:
            self.save(told=tokens % 2 == 0)

    @rule(task=TASK, worker=st.integers(0, 2), rows=st.integers(1, 5))
    def claim(self, task, worker, rows):
        granted = self.queue.claim(task, worker=f"w{worker}", rows=rows, now=self.now)
        if granted:
            self.leases.append((task, granted))
        if task != "score":
            for serial in {row.meta.serial for row in granted}:
                group = self.queue.table.state.partitions[P].groups[serial]
                mine = {row.sample for row in group.rows if row.state is RowState.LIVE}
                done = {row.sample for row in group.rows if (w := row.work.get(task)) and w.done}
                assert {row.meta.sample for row in granted if row.meta.serial == serial} | done == mine

    @rule(task=st.sampled_from([task.name for task in ASIDE]), rows=st.integers(1, 3), done=st.booleans())
    def look_aside(self, task, rows, done):
        granted = self.queue.claim(task, rows=rows, now=self.now)
        assert all(row.row in self.queue.held for row in granted)
        if granted and done:
            numbers = [row.row for row in granted]
            assert all(self.queue.table.complete(granted[0].lease, numbers, self.queue.cells(len(numbers)), None))

    def in_force(self, task, row):
        return f"{self.queue.work(task, row).lease:x}" == row.lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def complete(self, data):
        task, rows = data.draw(st.sampled_from(self.leases))
        some = [row for row in rows if data.draw(st.booleans())]
        if some:
            state = self.queue.table.state
            gone = [row.row not in state.rows and int(row.lease, 16) in state.leases.completed for row in some]
            done = [gone[i] or f"{self.queue.work(task, row).done:x}" == row.lease for i, row in enumerate(some)]
            expected = [done[i] or self.in_force(task, row) for i, row in enumerate(some)]
            assert self.queue.complete(some, WRITES[task]) == expected

    def filter(self, rows):
        for serial in {row.meta.serial for row in rows}:
            group = self.queue.table.state.partitions[P].groups[serial]
            mine = [row for row in rows if row.meta.serial == serial]
            rest = [row for row in group.rows if not row.state.final]
            if len(mine) == len(rest):
                ok = self.queue.table.claims.drop(mine[0].lease, [row.row for row in mine], "filtered:test")
                assert all(ok)
                self.filtered |= {tuple(row.meta.key) for row in mine}
                step = self.step_of(serial)
                self.groups[step] -= 1
                self.queue.table.training.open_step(P, step, self.groups[step], SIZE)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), partial=st.booleans(), reason=st.sampled_from(["test", None]))
    def give_back_or_save(self, data, partial, reason):
        task, rows = data.draw(st.sampled_from(self.leases))
        numbers = [row.row for row in rows]
        expected = [self.in_force(task, row) for row in rows]
        cells = self.queue.cells(len(rows), WRITES[task]) if partial else None
        assert self.queue.table.give_back(rows[0].lease, numbers, reason, cells) == expected
        if partial:
            kept = [number for number, ok in zip(numbers, expected, strict=True) if ok]
            self.queue.keep(kept, [WRITES[task]], partial=True)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds
        self.queue.table.claims.expire(self.now)

    @rule(task=TASK, lease_s=st.sampled_from([5, 10]))
    def declare_again(self, task, lease_s):
        spec = self.queue.table.state.partitions[P].queues[task].spec
        self.queue.table.declare([msgspec.structs.replace(spec, lease_s=lease_s)])

    @rule(worker=st.integers(0, 2))
    def kill_worker(self, worker):
        self.queue.table.claims.expire_worker(f"w{worker}")

    @rule(serial=st.integers(0, SERIALS - 1))
    def replace_creator(self, serial):
        self.queue.creator += 1
        self.queue.table.take_over(P, self.queue.creator)
        self.queue.creator -= 1
        with pytest.raises(Fenced):
            self.queue.create(serial, size=SIZE, step=1 + (serial + 1) % STEPS)
        self.queue.creator += 1

    @rule()
    def restart_controller(self):
        self.queue.restart(self.now)

    @precondition(lambda self: self.units < 3)
    @rule()
    def kill_unit(self):
        self.units += 1
        self.queue.replace_unit(f"unit-{self.units}")

    # --- the counting trainer

    @rule(chance=st.integers(0, 3))
    def restart_trainer(self, chance):
        if chance == 0 or self.attempt < 0:
            self.begin()

    def begin(self):
        self.attempt += 1
        self.queue.table.training.begin(P, self.attempt, self.checkpoint, 1)
        self.step, self.slot, self.partial = self.checkpoint + 1, 0, Counter()

    def train(self, *, tokens):
        slot = self.queue.table.training.slot(
            AskSlot(P, attempt=self.attempt, step=self.step, slot=self.slot, rank=0, tokens=tokens, wait_s=0)
        )
        if slot is None:
            return
        if not all(row.row in self.queue.held for row in slot.rows):
            self.begin()
            return
        self.slot += 1
        self.partial.update(tuple(row.meta.key) for row in slot.rows)
        if slot.last:
            self.weights[self.step] = self.weights[self.step - 1] + self.partial
            self.queue.table.training.step_done(P, self.attempt, self.step, 0)
            self.step, self.slot, self.partial = self.step + 1, 0, Counter()

    def save(self, *, told):
        self.checkpoint = max(self.checkpoint, self.step - 1)
        if told:
            self.queue.table.training.commit(P, self.attempt, self.checkpoint)

    @precondition(lambda self: self.checkpoint > 0)
    @rule(back=st.integers(1, STEPS), chance=st.integers(0, 3))
    def resume_an_older_checkpoint(self, back, chance):
        if chance:
            return
        self.checkpoint = max(0, self.checkpoint - back)
        self.begin()

    # --- what must always hold

    @invariant()
    def every_sample_is_in_one_state(self):
        partition = self.queue.table.state.partitions[P]
        alive = {(s, j): row for s, g in partition.groups.items() for j, row in enumerate(g.rows)}
        outcomes = {serial: f.outcome for of in partition.finished.values() for serial, f in of.items()}
        ended = {(s, j) for s, letters in outcomes.items() for j in range(len(letters))}
        assert alive.keys() | ended == self.created
        assert not alive.keys() & ended
        assert sum(partition.counts.values()) == len(self.created)
        for state in RowState:
            in_groups = sum(row.state is state for row in alive.values())
            letters = {RowState.TRAINED: "t", RowState.FILTERED: "f", RowState.DROPPED: "d"}
            finished = sum(outcome.count(letters.get(state, "-")) for outcome in outcomes.values())
            assert partition.counts[state] == in_groups + finished
        assert {row for row in alive.values() if row.state is RowState.WANTED} == set(partition.wanted)

    @invariant()
    def bytes_exist_exactly_for_rows_that_need_them(self):
        self.queue.events()
        assert self.queue.held.keys() == self.queue.table.state.rows.keys()

    @invariant()
    def no_row_has_two_holders(self):
        state = self.queue.table.state
        held = Counter((lease.task, row) for lease in state.leases for row in lease.rows)
        assert all(times == 1 for times in held.values())
        working = {(task, n) for n, row in state.rows.items() for task, work in row.work.items() if work.lease}
        assert held.keys() == working
        works = [row.work for row in state.rows.values() if row.state is RowState.LIVE]
        for name, queue in state.partitions[P].queues.items():
            assert queue.leased == sum(task == name for task, _ in held)
            assert queue.busy == sum(bool(name in work and (work[name].lease or work[name].done)) for work in works)

    @invariant()
    def indexes_agree_with_the_rows(self):
        partition = self.queue.table.state.partitions[P]
        for queue in partition.queues.values():
            assert set(queue.index) == self.queue.ready_by_hand(queue)

    @invariant()
    def the_log_makes_the_same_state_again(self):
        events = self.queue.events()
        live = list(snapshot(self.queue.table.state))
        again = QueueState()
        for event in events:
            again.apply(event)
        assert list(snapshot(again)) == live
        restored = QueueState()
        for event in live:
            restored.apply(decode(encode(event)))
        assert list(snapshot(restored)) == live
        assert again.rows.keys() == restored.rows.keys() == self.queue.table.state.rows.keys()

    @invariant()
    def the_auditor_agrees(self):
        counts = self.queue.table.state.partitions[P].counts
        repeats = set()
        for events in (self.queue.events(), snapshot(self.queue.table.state)):
            auditor = Auditor()
            for event in events:
                auditor.see(event)
            report = auditor.report()
            assert (report.trained, report.filtered) == (counts[RowState.TRAINED], counts[RowState.FILTERED])
            assert report.dispatched == len(self.created)
            assert report.duplicated == 0
            repeats.add((report.redeliveries, report.attempts))
            skipped = {s for s in range(max((k[0] for k in self.created), default=0)) if (s, 0) not in self.created}
            assert report.lost == len(skipped) * SIZE
        assert len(repeats) == 1

    def teardown(self):
        if not hasattr(self, "queue"):
            return
        self.queue.table.claims.expire(self.now + 1000)
        if self.attempt < 0:
            self.begin()
        for _ in range(100):
            for serial in range(SERIALS):
                self.create(serial)
            for task, column in WRITES.items():
                while rows := self.queue.claim(task, rows=100, now=self.now):
                    assert all(self.queue.complete(rows, column))
            if self.step > STEPS:
                break
            self.train(tokens=3)
        self.save(told=True)
        expected = {(s, j) for s in range(SERIALS) for j in range(SIZE)} - self.filtered
        assert self.weights[STEPS] == Counter(expected)
        self.queue.table.close(P, STEPS)
        auditor = Auditor()
        for event in self.queue.events():
            auditor.see(event)
        report = auditor.report()
        assert report.ok, report
        assert (report.trained, report.filtered) == (len(expected), len(self.filtered))
        assert self.queue.held == {}


def test_machine(make_queue, tasks, monkeypatch):
    monkeypatch.setattr("asyncflow.queue.table.snapshot._ROWS", 3)
    QueueMachine.make_queue = lambda: make_queue([*tasks, *ASIDE])
    often = settings(max_examples=80, stateful_step_count=40, derandomize=True)
    run_state_machine_as_test(QueueMachine, settings=settings(often, deadline=None, suppress_health_check=HealthCheck))
