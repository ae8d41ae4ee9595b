"""Rows that move between units while everything else goes on: the pure table and real holdings, without sockets."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from asyncflow.errors import StaleHandle
from asyncflow.identity import RowPlace, location_at
from asyncflow.queue.ledger.audit import Auditor
from asyncflow.queue.protocol.calls import NOWHERE
from asyncflow.queue.protocol.unit_calls import AskMove, EntryResult, MovedRows, NewCells, NewRows, Session
from asyncflow.queue.storage.budget import ByteBudget
from asyncflow.queue.storage.drain import MovingRows
from asyncflow.queue.storage.holdings import Holdings
from asyncflow.queue.storage.memory import MemoryBackend
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.moves import Room, choose
from asyncflow.queue.table.rows import put as admit_put
from asyncflow.queue.table.rows import write as admit_write
from asyncflow.queue.table.snapshot import snapshot
from asyncflow.queue.table.table import Table
from asyncflow.rpc.columns import Jagged

P = "p"
CLIENT = b"a client"
OUTPUTS = {"late": 16}


class Unit:
    """One incarnation of a unit. values: of each put; orders: rows to free; sent: what it has sent, and to whom."""

    def __init__(self, index, epoch):
        self.index, self.epoch, self.location = index, epoch, location_at(epoch, index)
        self.budget = ByteBudget(1 << 20, where="test")
        self.holdings = Holdings(backend=MemoryBackend(), budget=self.budget, where="test", lost=lambda _: None)
        self.moving = MovingRows(self.holdings, location=lambda: self.location, where="test")
        self.values, self.orders, self.sent, self.move_order, self.counter = {}, [], [], None, 0
        self.synced = True

    def fresh(self, count):
        first, self.counter = self.counter, self.counter + count
        return [RowPlace(self.epoch, self.index, first + n).row for n in range(count)]

    async def put(self, rows, columns, entry, **options):
        blob = await self.holdings.store(columns, new=len(rows), outputs=OUTPUTS, timeout=0, **options)
        put = self.holdings.propose(entry(blob.cells), blob)
        self.values[put] = {
            row: {name: int(of.row(n)[0]) for name, of in columns.items()} for n, row in enumerate(rows)
        }
        return put


def puts(unit):
    return unit.holdings.puts


def orders(unit):
    return unit.orders


def sent(unit):
    return unit.sent


class Movement(RuleBasedStateMachine):
    """Each rule is one message, or the loss of one. truth: what was last written to each row, as was admitted."""

    @initialize()
    def begin(self):
        self.runner = asyncio.Runner()
        self.table = Table()
        self.table.start(0.0)
        self.log, self.truth, self.units = [], {}, {}
        self.names, self.serial, self.version, self.kills = 0, 0, 0, 0
        for index in range(3):
            self.enter(index)
            self.runner.run(self.placed(self.units[index], 2, 2))
            self.runner.run(self.told(self.units[index]))
        self.leave(self.units[0])

    def teardown(self):
        if hasattr(self, "runner"):
            self.settle()
            self.runner.close()

    def enter(self, index):
        self.names += 1
        self.units[index] = Unit(index, self.table.join_unit(index, f"unit-{self.names}"))
        self.flush()

    def flush(self):
        state = self.table.state
        self.log += state.outbox
        state.outbox.clear()
        for row in state.to_free:
            for unit in self.units.values():
                if unit.location == row.location:
                    unit.orders.append(row.row)
        state.to_free.clear()

    def leaving(self, unit):
        return unit.epoch in self.table.state.leaving

    def stays(self, unit):
        return not self.leaving(unit)

    def some(self, condition=lambda _: True):
        return [unit for unit in self.units.values() if unit.synced and condition(unit)]

    def one(self, data, condition=lambda _: True):
        return data.draw(st.sampled_from(self.some(condition)))

    # --- what users do

    @precondition(lambda self: self.some(self.stays))
    @rule(data=st.data(), groups=st.integers(1, 3), size=st.integers(1, 2))
    def put(self, data, groups, size):
        self.runner.run(self.placed(self.one(data, self.stays), groups, size))

    async def placed(self, unit, groups, size):
        rows, group = unit.fresh(groups * size), self.serial
        values = range(self.version + 1, self.version + 1 + len(rows))
        self.version, self.serial = self.version + len(rows), group + groups
        columns = {"x": Jagged.from_rows([[value] * 3 for value in values], "int64")}
        await unit.put(rows, columns, lambda cells: NewRows(P, CLIENT, group, size, rows, cells, []))

    @precondition(lambda self: self.table.state.rows)
    @rule(data=st.data(), name=st.sampled_from(["x", "late"]), answered=st.booleans())
    def write(self, data, name, answered):
        number = data.draw(st.sampled_from(sorted(self.table.state.rows)))
        unit = self.units[self.table.moves.where([number])[0]]
        if unit.moving.away([number], write=True) or number not in unit.holdings.rows:
            return
        self.version += 1
        value, lease = self.version, f"write:{self.version}"
        columns = {name: Jagged.from_rows([[value] * 2], "int64")}

        async def store():
            blob = await unit.holdings.store(columns, rows=[number], lease=lease, timeout=0)
            put = unit.holdings.propose(NewCells(lease, [number], blob.cells, [], "complete"), blob)
            unit.values[put] = {number: {name: value}}
            if unit.synced and answered:
                await self.told(unit)

        self.runner.run(store())

    @precondition(lambda self: self.table.state.rows)
    @rule(data=st.data())
    def clear(self, data):
        self.table.clear_rows(P, [data.draw(st.sampled_from(sorted(self.table.state.rows)))])
        self.flush()

    # --- what units and the controller tell each other

    @precondition(lambda self: self.some(puts))
    @rule(data=st.data(), answered=st.booleans())
    def tell(self, data, answered):
        self.runner.run(self.told(self.one(data, puts), answered=answered))

    async def told(self, unit, *, answered=True):
        for put in list(unit.holdings.puts):
            ok = self.admit(unit, put)
            if answered:
                unit.holdings.decide(put, EntryResult(ok))

    def admit(self, unit, put):
        entry, rows, values = put.entry, put.rows, unit.values[put]
        if isinstance(entry, MovedRows):
            ok = self.table.move_in(unit.location, entry)
        elif isinstance(entry, NewRows):
            ok, _ = admit_put(self.table.state, entry)
            self.truth |= {
                row: values[row] for row, good in zip(rows, ok, strict=True) if good and row not in self.truth
            }
        else:
            try:
                ok = admit_write(self.table.state, rows, entry.cells, [])
                self.truth[rows[0]] = self.truth[rows[0]] | values[rows[0]]
            except StaleHandle:
                ok = [False]
        self.flush()
        return ok

    @precondition(lambda self: self.some(orders))
    @rule(data=st.data())
    def obey(self, data):
        self.runner.run(self.obeyed(self.one(data, orders)))

    async def obeyed(self, unit):
        await self.told(unit)
        unit.holdings.clear(unit.orders)
        unit.orders = []

    # --- how units leave

    @precondition(lambda self: len(self.some(self.stays)) > 1)
    @rule(data=st.data())
    def drain(self, data):
        self.leave(self.one(data, self.stays))

    def leave(self, unit):
        self.table.moves.drain(unit.index)
        unit.moving.draining = True
        self.flush()

    @precondition(lambda self: self.some(self.leaving))
    @rule(data=st.data(), sends=st.booleans(), tells=st.booleans())
    def ask(self, data, sends, tells):
        unit = self.one(data, self.leaving)
        self.runner.run(self.asked(unit))
        if sends and unit.move_order.rows:
            self.send(unit)
            if tells and self.units[unit.move_order.unit].synced:
                self.runner.run(self.told(self.units[unit.move_order.unit]))

    async def asked(self, unit):
        rooms = {
            other.index: Room(len(other.holdings), 1 << 20)
            for other in self.units.values()
            if other.synced and not self.leaving(other)
        }
        rows, nbytes = unit.moving.first(most=3, most_bytes=1 << 20)
        session = Session(unit.index, self.table.controller, unit.epoch)
        unit.move_order = self.table.moves.next_order(AskMove(session, rows, len(unit.holdings), nbytes), rooms)
        unit.moving.frozen = frozenset()
        unit.holdings.clear(unit.move_order.gone)
        unit.moving.frozen = frozenset(unit.move_order.rows)
        assert not (unit.move_order.over and len(unit.holdings))

    def send(self, unit):
        """Send the rows of a move order, unless the unit must wait yet."""
        if not unit.move_order.rows or self.units[unit.move_order.unit].moving.draining:
            return
        if all(set(put.rows).isdisjoint(unit.move_order.rows) for put in unit.holdings.puts):
            self.runner.run(self.sent(unit, self.units[unit.move_order.unit]))

    async def sent(self, unit, other):
        for batch in unit.moving.batches(unit.move_order.rows, most_bytes=100):
            columns = await unit.holdings.fetch(batch, list(unit.holdings.rows[batch[0]].cells))
            rows, ticket = batch, unit.move_order.ticket
            entry = lambda cells: MovedRows(unit.location, ticket, rows, cells, [], [0] * len(rows), [{}] * len(rows))  # noqa: B023, E731
            unit.sent.append((rows, await other.put(rows, columns, entry)))

    @precondition(lambda self: self.some(sent))
    @rule(data=st.data())
    def hear(self, data):
        self.runner.run(self.heard(self.one(data, sent)))

    async def heard(self, unit):
        for rows, put in unit.sent:
            if put.result.done():
                unit.holdings.clear(row for row, ok in zip(rows, put.result.result().ok, strict=True) if ok)
        unit.sent = [(rows, put) for rows, put in unit.sent if not put.result.done()]

    # --- what goes wrong

    @rule(index=st.integers(0, 2), sure=st.integers(0, 2))
    def kill(self, index, sure):
        if not sure and self.units[index].synced:
            self.kills += 1
            self.enter(index)

    @precondition(lambda self: all(unit.synced for unit in self.units.values()))
    @rule(compacted=st.booleans())
    def restart(self, compacted):
        assert list(snapshot(self.replayed())) == list(snapshot(self.table.state))
        if compacted:
            self.log = list(snapshot(self.table.state))
        self.table = Table()
        self.table.state.replay(self.log)
        self.table.start(0.0)
        for unit in self.units.values():
            unit.synced, unit.orders = False, []
        self.flush()

    @precondition(lambda self: not all(unit.synced for unit in self.units.values()))
    @rule(data=st.data())
    def greet(self, data):
        silent = [unit for unit in self.units.values() if not unit.synced]
        self.runner.run(self.greeted(data.draw(st.sampled_from(silent))))

    async def greeted(self, unit):
        await self.told(unit)
        unit.holdings.clear(self.table.hold(unit.location, unit.holdings.held(unit.holdings.rows)))
        before = len(self.table.state.rows)
        self.table.miss(unit.location)
        assert len(self.table.state.rows) == before
        unit.synced = True
        self.flush()

    def replayed(self):
        state = QueueState()
        state.replay(self.log)
        return state

    # --- what must hold in the end

    def settle(self):
        self.runner.run(self.settled())
        state = self.table.state
        assert list(snapshot(self.replayed())) == list(snapshot(state))
        assert self.kills or not any(partition.wanted for partition in state.partitions.values())
        for unit in self.units.values():
            here = {number for number, row in state.rows.items() if row.location == unit.location}
            assert set(unit.holdings.rows) == here
            assert unit.budget.used == sum(row.size for row in unit.holdings.rows.values())
            assert unit.budget.promised == sum(row.promise for row in unit.holdings.rows.values())
            for number in here:
                row, truth = state.rows[number], self.truth[number]
                assert (set(row.columns), row.reported) == (set(truth), True)
                got = self.runner.run(unit.holdings.fetch([number], list(truth)))
                assert {name: int(of.row(0)[0]) for name, of in got.items()} == truth
        auditor = Auditor()
        for event in self.log:
            auditor.see(event)
        assert auditor.report().ok, auditor.report()

    async def settled(self):
        for unit in self.units.values():
            if not unit.synced:
                await self.greeted(unit)
        for _ in range(2):
            for unit in self.units.values():
                await self.obeyed(unit)
                await self.heard(unit)
            for unit in self.units.values():
                if self.leaving(unit):
                    await self.asked(unit)


def test_movement():
    run_state_machine_as_test(
        Movement,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def queue():
    """Three units with four rows each, in pairs; unit 0 leaves, so that two of its rows go to each of the others."""
    made = Movement()
    made.begin()
    yield made
    made.teardown()


def rows_at(queue, index):
    return [number for number, row in queue.table.state.rows.items() if row.unit == index]


def ask_and_send(queue):
    unit = queue.units[0]
    queue.runner.run(queue.asked(unit))
    queue.send(unit)
    return list(unit.move_order.rows), queue.units[unit.move_order.unit]


def tell(queue, unit, *, answered=True):
    queue.runner.run(queue.told(unit, answered=answered))


def write(queue, unit, number, value):
    async def store():
        columns = {"x": Jagged.from_rows([[value] * 2], "int64")}
        blob = await unit.holdings.store(columns, rows=[number], lease=f"write:{value}", timeout=0)
        put = unit.holdings.propose(NewCells(f"write:{value}", [number], blob.cells, [], "complete"), blob)
        unit.values[put] = {number: {"x": value}}
        await queue.told(unit)

    assert not unit.moving.away([number], write=True)
    queue.runner.run(store())


def test_a_group_moves_whole_and_nothing_is_written_to_it_meanwhile(queue):
    rows, other = ask_and_send(queue)
    assert len(rows) == 2
    assert all(queue.units[0].moving.away([number], write=True) for number in rows)
    tell(queue, other)
    assert set(rows_at(queue, other.index)) >= set(rows)
    assert queue.table.moves.where([*rows, 5]) == [other.index] * 2 + [NOWHERE]


def test_what_was_sent_before_the_controller_was_asked_again_comes_too_late(queue):
    rows, other = ask_and_send(queue)
    queue.runner.run(queue.asked(queue.units[0]))
    queue.units[0].moving.frozen = frozenset()
    write(queue, queue.units[0], rows[0], 1000)
    tell(queue, other)
    assert set(rows_at(queue, 0)) >= set(rows)
    assert not set(other.holdings.rows) & set(rows)


def test_of_rows_that_were_sent_twice_the_unit_keeps_what_was_sent_last(queue):
    rows, other = ask_and_send(queue)
    queue.runner.run(queue.asked(queue.units[0]))
    queue.units[0].moving.frozen = frozenset()
    write(queue, queue.units[0], rows[0], 1000)
    again, same = ask_and_send(queue)
    assert (again, same) == (rows, other)
    tell(queue, other, answered=False)
    tell(queue, other)
    assert set(rows_at(queue, other.index)) >= set(rows)


def test_who_did_not_hear_that_its_rows_moved_clears_them_when_it_asks_or_greets(queue):
    rows, other = ask_and_send(queue)
    tell(queue, other)
    assert set(queue.units[0].holdings.rows) >= set(rows)
    assert queue.table.hold(queue.units[0].location, queue.units[0].holdings.held(rows)) == rows
    queue.runner.run(queue.asked(queue.units[0]))
    assert queue.units[0].move_order.gone == rows
    assert not set(queue.units[0].holdings.rows) & set(rows)


def test_a_restarted_controller_takes_rows_over_from_a_unit_that_has_not_greeted_it(queue):
    rows, other = ask_and_send(queue)
    tell(queue, other, answered=False)
    queue.restart(compacted=True)
    queue.runner.run(queue.greeted(other))
    assert set(rows_at(queue, other.index)) >= set(rows)
    assert all(queue.table.state.rows[number].reported for number in rows)


def test_rows_of_a_unit_that_died_over_its_leave_are_wanted_and_what_was_sent_is_freed(queue):
    rows, other = ask_and_send(queue)
    queue.kills = 1
    queue.enter(0)
    tell(queue, other)
    assert len(queue.table.state.partitions[P].wanted) == 4
    assert not set(other.holdings.rows) & set(rows)


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=5),
    st.integers(0, 100),
    st.integers(-1, 5),
)
def test_rows_go_where_there_is_room_and_fewest_are(rooms, nbytes, but):
    rooms = {unit: Room(*room) for unit, room in rooms.items()}
    unit = choose(rooms, nbytes=nbytes, but=but)
    if not rooms:
        assert unit == NOWHERE
        return
    others = {index: room for index, room in rooms.items() if index != but} or rooms
    fitting = [room.rows for room in others.values() if room.free >= nbytes]
    assert unit in others
    assert rooms[unit].rows == min(fitting or [room.rows for room in others.values()])
    assert not fitting or rooms[unit].free >= nbytes
