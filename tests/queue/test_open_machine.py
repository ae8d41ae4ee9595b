"""Open rows in any order of events: the pure table against a dictionary, and against its own log.

The model is what a user believes: rows with columns, tags and a key; for each task, which rows it has had. Restarts,
lost units, expired leases, resets and clears may come at any time.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from asyncflow.errors import Refused, StaleHandle
from asyncflow.identity import RowPlace, location_at
from asyncflow.queue.ledger.audit import Auditor
from asyncflow.queue.protocol.calls import ClaimRows, parse_lease
from asyncflow.queue.protocol.messages import KEY_TAG, TaskSpec
from asyncflow.queue.protocol.unit_calls import Cells, Held, NewRows
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.replication import decode, encode
from asyncflow.queue.table.report import find, listing, peek, progress
from asyncflow.queue.table.rows import list_rows, put, reset, write
from asyncflow.queue.table.snapshot import snapshot
from asyncflow.queue.table.state import RowState
from asyncflow.queue.table.table import Table

P = "scores"
NEEDS = {"grade": ["text"], "both": ["text", "score"], "whole": ["text"]}
TASK = st.sampled_from(sorted(NEEDS))
COLUMN = st.sampled_from(["text", "score"])
CLIENT = b"a client"
FIRST = 1 << 32
"""The serial of its first group."""


class OpenMachine(RuleBasedStateMachine):
    @initialize(groups=st.integers(0, 3), size=st.integers(1, 3))
    def start(self, groups, size):
        self.now, self.epochs, self.counter, self.serial, self.tickets = 0.0, 0, 0, FIRST, 0
        self.log, self.rows, self.gone, self.lost, self.leases = [], {}, set(), {}, []
        self.expected, self.cleared, self.dropped, self.resets, self.peeked = None, 0, 0, 0, 0
        self.table = Table()
        self.table.start(0.0)
        self.table.declare([TaskSpec(partition=P, name=n, needs=c, groups=n == "whole") for n, c in NEEDS.items()])
        self.replace_unit()
        self.put_more(groups, size)

    # --- what happens

    @rule(groups=st.integers(1, 3), size=st.integers(1, 3), key=st.none() | st.sampled_from("ab"), again=st.booleans())
    def put(self, groups, size, key, again):
        size, groups = (1, 1) if key else (size, groups)
        numbers = self.fresh(groups * size)
        tags = [{KEY_TAG: key, "n": 0}] if key else [{"n": n} for n in range(len(numbers))]
        had = next((number for number, row in self.rows.items() if key and row["key"] == key), None)
        for _ in range(1 + again):
            cells = Cells(dtypes={"text": "text"}, sizes={"text": [3] * len(numbers)})
            entry = NewRows(P, CLIENT, self.serial - FIRST, size, numbers, cells, tags)
            ok, answer = put(self.table.state, entry)
            if had is not None:
                assert (ok, answer) == ([False], [had])
            elif ok[0]:
                assert all(ok)
                self.lost = {number: row for number, row in self.lost.items() if not key or row["key"] != key}
                for index, number in enumerate(numbers):
                    self.rows[number] = {
                        "group": self.serial + index // size,
                        "key": key or "",
                        "tags": {"n": tags[index]["n"]},
                        "columns": {"text": 3},
                        "had": {},
                        "held": {},
                    }
            else:
                assert answer == numbers
        self.serial += groups

    @rule(data=st.data(), column=COLUMN, size=st.integers(0, 9), dtype=st.sampled_from(["text", "int8"]))
    def write(self, data, column, size, dtype):
        numbers = self.some(data)
        stale = any(number not in self.rows for number in numbers)
        state = self.table.state
        wrong = bool(numbers) and not stale and state.partitions[P].schema.get(column, dtype) != dtype
        cells = Cells(dtypes={column: dtype}, sizes={column: [size] * len(numbers)})
        tags = [{"late": size}] * len(numbers)
        if stale or wrong:
            with pytest.raises(StaleHandle if stale else Refused):
                write(state, numbers, cells, tags)
            return
        assert write(state, numbers, cells, tags) == [True] * len(numbers)
        for number in numbers:
            self.rows[number]["columns"][column] = size
            self.rows[number]["tags"]["late"] = size

    @rule(task=TASK, most=st.integers(1, 5), worker=st.sampled_from("vw"))
    def claim(self, task, most, worker):
        self.tickets += 1
        claim = ClaimRows(P, task, worker, f"t{self.tickets}", max_rows=most)
        self.table.claims.park(claim)
        batches = [rows for met, rows in self.table.claims.serve(self.now) if met is claim]
        self.table.claims.withdraw(claim)
        if not batches:
            assert not self.ready(task)
            return
        (batch,) = batches
        assert {row.row for row in batch} <= self.ready(task)
        for row in batch:
            self.rows[row.row]["held"][task] = row.lease
        self.leases.append((task, batch[0].lease, [row.row for row in batch]))

    @rule(data=st.data(), how=st.sampled_from(["complete", "return", "drop"]))
    def end(self, data, how):
        if not self.leases:
            return
        task, lease, numbers = data.draw(st.sampled_from(self.leases))
        held = [n in self.rows and self.rows[n]["held"].get(task) == lease for n in numbers]
        done = [n in self.rows and self.rows[n]["had"].get(task) == lease for n in numbers]
        if how == "complete":
            cleared = [number not in self.rows and self.is_completed(lease) for number in numbers]
            ok = self.table.complete(lease, numbers, Cells(dtypes={}, sizes={}), [])
            assert ok == list(map(any, zip(held, done, cleared, strict=True)))
        elif how == "return":
            assert self.table.give_back(lease, numbers, "test") == held
        else:
            held[1:] = [False] * len(held[1:])
            assert self.table.claims.drop(lease, numbers[:1], "test") == held[:1]
        for number in (number for number, mine in zip(numbers, held, strict=True) if mine):
            del self.rows[number]["held"][task]
            if how == "complete":
                self.rows[number]["had"][task] = lease
            elif how == "drop":
                del self.rows[number]
                self.gone.add(number)
                self.dropped += 1

    def is_completed(self, lease):
        """Return whether all rows of a lease were completed: what is said again of those cleared since is admitted."""
        return parse_lease(lease)[0] in self.table.state.leases.completed

    @rule(worker=st.sampled_from("vw"))
    def lose_worker(self, worker):
        held = {lease.name for lease in self.table.state.leases if lease.worker == worker}
        self.table.claims.expire_worker(worker)
        for row in self.rows.values():
            row["held"] = {task: lease for task, lease in row["held"].items() if lease not in held}

    @rule(task=st.none() | TASK)
    def reset(self, task):
        names = NEEDS if task is None else [task]
        had = sum(name in row["held"] or name in row["had"] for row in self.rows.values() for name in names)
        assert reset(self.table.state, self.partition, task) == had
        self.resets += had
        for row in self.rows.values():
            for name in names:
                row["held"].pop(name, None)
                row["had"].pop(name, None)

    @rule(groups=st.integers(0, 3), size=st.integers(1, 3))
    def lose_unit(self, groups, size):
        self.lost |= self.rows
        self.rows.clear()
        self.gone.clear()
        self.replace_unit()
        self.put_more(groups, size)

    @rule(data=st.data())
    def clear_rows(self, data):
        numbers = [*self.some(data), *self.lost][:6]
        known = self.lost | self.rows
        assert self.table.clear_rows(P, numbers) == [number in known for number in numbers]
        for number in set(numbers) & known.keys():
            if self.rows.pop(number, None):
                self.gone.add(number)
            self.lost.pop(number, None)
            self.cleared += 1

    @rule(groups=st.integers(0, 3), size=st.integers(1, 3))
    def clear(self, groups, size):
        self.table.clear(P)
        self.gone |= self.rows.keys()
        self.rows.clear()
        self.lost.clear()
        self.cleared, self.dropped, self.expected = 0, 0, None
        self.put_more(groups, size)

    @rule(total=st.integers(0, 9))
    def expect(self, total):
        self.table.expect(P, total)
        self.expected = total

    @rule(task=TASK)
    def look(self, task):
        rows = list(list_rows(self.partition))
        sight = peek(self.table.state, self.partition, task, rows)
        self.peeked += len(rows)
        assert {n for n, ready in zip(sight.rows, sight.ready, strict=True) if ready} == self.ready(task)
        for place, number in enumerate(sight.rows):
            row = self.rows[number]
            assert sight.done[place] == (task in row["had"])
            assert sight.leased[place] == (task in row["held"])
            assert set(sight.lacks[place]) == set(NEEDS[task]) - row["columns"].keys()

    @rule()
    def restart(self):
        held = [self.told(number) for number in self.rows] + [self.told(number) for number in self.gone]
        self.events()
        self.table = Table()
        for event in self.log:
            self.table.state.apply(event)
        self.table.start(self.now)
        assert set(self.table.hold(location_at(self.epoch, 0), held)) == self.gone
        assert self.table.miss(location_at(self.epoch, 0)) == 0
        self.lost = {number: row | {"key": ""} for number, row in self.lost.items()}
        self.gone.clear()

    # --- what must always hold

    @invariant()
    def the_listing_is_what_the_user_believes(self):
        told_rows = listing(list_rows(self.partition))
        told = {n: (k, t) for n, k, t in zip(told_rows.rows, told_rows.keys, told_rows.tags, strict=True)}
        assert told == {number: (row["key"], row["tags"]) for number, row in self.rows.items()}
        assert len(self.partition.wanted) == len(self.lost)
        keys = {row["key"]: number for number, row in self.rows.items() if row["key"]}
        lost = [row["key"] for row in self.lost.values()]
        found = find(self.partition, ["a", "b"])
        assert found.rows == [keys.get("a", 0), keys.get("b", 0)]
        assert found.lost == [key for key in ("a", "b") if key in lost]
        assert found.unnamed == lost.count("")
        assert self.table.state.rows.keys() == self.rows.keys()

    @invariant()
    def progress_is_what_the_user_believes(self):
        for task in NEEDS:
            told = progress(self.partition, columns=[], task=task)
            assert told.done == sum(task in row["had"] for row in self.rows.values())
            assert told.leased == sum(task in row["held"] for row in self.rows.values())
            assert (told.rows, told.cleared, told.expected) == (
                len(self.rows) + len(self.lost) + self.dropped,
                self.cleared,
                self.expected,
            )
        assert (self.partition.resets, self.partition.peeked) == (self.resets, self.peeked)

    @invariant()
    def what_is_ready_is_what_the_user_believes(self):
        for task, queue in self.partition.queues.items():
            rows = [row for item in queue.index for row in (queue.open_rows(item) if queue.by_group else [item])]
            assert {row.row for row in rows} == self.ready(task)
            assert queue.index.weight == len(rows)

    @invariant()
    def the_log_makes_the_same_state_again(self):
        self.events()
        live = list(snapshot(self.table.state))
        for events in (self.log, live):
            again = QueueState()
            for event in events:
                again.apply(decode(encode(event)))
            assert list(snapshot(again)) == live

    @invariant()
    def the_auditor_agrees(self):
        self.events()
        for events in (self.log, snapshot(self.table.state)):
            auditor = Auditor()
            for event in events:
                auditor.see(event)
            report = auditor.report()
            assert report.ok, report
            counts = self.partition.counts
            assert report.remaining == counts[RowState.LIVE] + counts[RowState.WANTED]
            assert report.without_bytes == counts[RowState.WANTED]
            assert report.cleared == self.partition.cleared + counts[RowState.DROPPED] + counts[RowState.FILTERED]

    # --- short words

    def put_more(self, groups, size):
        """Put rows, without which there is little that can happen."""
        if groups:
            self.put(groups, size, key=None, again=False)

    @property
    def partition(self):
        return self.table.state.partition(P)

    def ready(self, task):
        """The rows that the next claim of ``task`` may give."""

        def fits(row):
            return task not in row["had"] and task not in row["held"] and set(NEEDS[task]) <= row["columns"].keys()

        blocked = {
            row["group"] for row in self.rows.values() if task == "whole" and not fits(row) and task not in row["had"]
        } | {row["group"] for row in self.lost.values() if task == "whole"}
        return {number for number, row in self.rows.items() if fits(row) and row["group"] not in blocked}

    def fresh(self, count):
        first, self.counter = self.counter, self.counter + count
        return [RowPlace(self.epoch, 0, first + index).row for index in range(count)]

    def some(self, data):
        known = sorted([*self.rows, *self.gone])
        return data.draw(st.lists(st.sampled_from(known), unique=True, max_size=4)) if known else []

    def told(self, number):
        row = self.rows.get(number, {"columns": {}, "tags": {}, "key": ""})
        tags = row["tags"] | ({KEY_TAG: row["key"]} if row["key"] else {})
        return Held(row=number, columns=dict(row["columns"]), partial={}, tokens=0, tags=tags)

    def replace_unit(self):
        self.epochs += 1
        self.epoch = self.table.join_unit(0, f"unit-{self.epochs}")
        self.counter = 0

    def events(self):
        self.log += self.table.state.outbox
        self.table.state.outbox.clear()
        self.table.state.to_free.clear()

    def teardown(self):
        if hasattr(self, "table"):
            assert self.partition.counts[RowState.LIVE] == len(self.rows)


def test_open_machine(monkeypatch):
    monkeypatch.setattr("asyncflow.queue.table.snapshot._ROWS", 4)
    run_state_machine_as_test(
        OpenMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=HealthCheck,
        ),
    )
