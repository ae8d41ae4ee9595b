"""A queue with three controllers, on sockets in this process: its tasks are decided about by different ones."""

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec
import pytest

from asyncflow.errors import DeadlineExceeded, Refused, StaleHandle
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.audit import audit_ledgers
from asyncflow.queue.partition import Partition
from asyncflow.queue.peers import Peer
from asyncflow.queue.protocol.calls import LEASE_BITS, AskProgress, DropRows, Feed, Follow, Reach
from asyncflow.queue.protocol.messages import Progress, Samples, TaskSpec
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.queue.table.replication import WorkerLost
from asyncflow.queue.values import encode
from asyncflow.roles.controller import _show
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import Jagged
from asyncflow.telemetry.metrics import ControllerMetrics

P = "open"
TASKS = [
    TaskSpec(partition=P, name="grade", needs=["text"], writes=["score"]),
    TaskSpec(partition=P, name="check", needs=["text", "score"], writes=["mark"]),
    TaskSpec(partition=P, name="read", needs=["text", "mark"]),
]
PLACES = {"grade": 1, "check": 2, "read": 0}


class Replicated:
    """Three controllers and units."""

    def __init__(self, folder, *, count=3, units=2, **options):
        self.folder, self.count, self.options = folder, count, options
        self.controllers = dict.fromkeys(range(count))
        self.units = dict.fromkeys(range(units))
        self.client = self.connect("test")

    def address(self, server):
        return server.server.address or None if server else None

    def of(self, index):
        return self.address(self.controllers[index])

    def connect(self, worker):
        return QueueClient(
            find=lambda role, index: self.of(index) if role == "controller" else self.address(self.units[index]),
            units=lambda: [index for index, unit in self.units.items() if unit],
            worker=worker,
        )

    async def start(self):
        for index in self.controllers:
            await self.start_controller(index)
        for index in self.units:
            await self.start_unit(index)
        await self.client.declare(TASKS, timeout=10)
        return self

    async def start_controller(self, index):
        folder = self.folder / "ledger" / str(index) if index else self.folder / "ledger"
        self.controllers[index] = Controller(
            ledger_dir=folder, index=index, controllers=self.count, address=self.of, **self.options
        )
        await self.controllers[index].start()

    async def stop_controller(self, index):
        stopping, self.controllers[index] = self.controllers[index], None
        await stopping.close()

    async def start_unit(self, index):
        self.units[index] = StorageUnit(
            index=index,
            limit_bytes=1 << 20,
            controller=lambda: self.of(0),
            find=lambda role, other: self.of(other) if role == "controller" else self.address(self.units.get(other)),
        )
        await self.units[index].start()
        await self.units[index].joined(10)

    async def put(self, count, **options):
        texts = Jagged.from_rows([[number] for number in range(count)], "int64")
        return (await self.client.put(P, {"text": texts}, timeout=10, **options)).rows

    async def claim(self, task, *, rows=100, timeout=10):
        return (await self.client.claim(partition=P, task=task, max_rows=rows, timeout=timeout)).rows

    async def claim_all(self, task, count):
        leased = []
        while len(leased) < count:
            more = await self.claim(task)
            assert more, f"{task} has {len(leased)} of {count}"
            leased += more
        assert len(leased) == count
        return leased

    async def complete(self, leased, column=None, *, timeout=10):
        columns = {column: Jagged.from_rows([[row.row] for row in leased], "int64")} if column else {}
        return await self.client.complete(leased, columns, timeout=timeout)

    async def through(self, count):
        for task, column in (("grade", "score"), ("check", "mark"), ("read", None)):
            assert all(await self.complete(await self.claim_all(task, count), column))

    async def close(self):
        await self.client.close()
        for unit in self.units.values():
            await unit.close()
        for index, controller in self.controllers.items():
            if controller:
                await self.stop_controller(index)


@pytest.fixture
async def queue(tmp_path):
    queue = Replicated(tmp_path)
    try:
        yield await queue.start()
    finally:
        await queue.close()


def places(queue):
    partition = queue.controllers[0].table.state.partitions[P]
    return dict.fromkeys(partition.queues, 0) | {n: d.controller for n, d in partition.elsewhere.items()}


async def test_tasks_are_spread_and_rows_go_through_all(queue):
    assert places(queue) == PLACES
    rows = await queue.put(20)
    await queue.through(20)
    fetched = await queue.client.fetch(rows, ["text", "score", "mark"], timeout=10)
    assert [int(cell[0]) for cell in fetched["mark"].rows()] == rows
    for task in PLACES:
        progress = await Partition(queue.client, P).consumed(task, timeout=10)
        assert (progress.rows, progress.done) == (20, 20)


async def test_a_claim_at_the_wrong_controller_says_which_is_right(queue):
    wrong = queue.connect("wrong")
    wrong._deciding[P, "grade"] = Peer("controller", 2)
    await queue.put(2)
    assert len((await wrong.claim(partition=P, task="grade", max_rows=2, timeout=10)).rows) == 2
    assert wrong._deciding[P, "grade"] == Peer("controller", 1)
    await wrong.close()


async def test_a_claim_that_waits_for_a_task_is_sent_on_when_it_is_declared(queue):
    claim = asyncio.create_task(queue.client.claim(partition=P, task="later", max_rows=1, timeout=10))
    await queue.put(1)
    await queue.client.declare([TaskSpec(partition=P, name="later", needs=["text"])], timeout=10)
    assert len((await claim).rows) == 1
    assert places(queue)["later"] == 1


async def test_a_task_of_a_replica_cannot_begin_to_end_rows(queue):
    clearing = TaskSpec(partition=P, name="grade", needs=["text"], clears=True)
    with pytest.raises(Refused, match="only the primary ends rows"):
        await queue.client.declare([clearing], timeout=10)


async def test_a_replica_that_comes_back_knows_what_was_done_and_held(queue):
    await queue.put(6)
    held = await queue.claim("grade", rows=3)
    done = await queue.claim("grade", rows=2)
    assert all(await queue.complete(done, "score"))
    await queue.stop_controller(1)
    more = await queue.put(2)
    await queue.start_controller(1)
    assert all(await queue.complete(held, "score"))
    rest = await queue.claim_all("grade", 3)
    assert {row.row for row in rest}.isdisjoint(row.row for row in [*held, *done])
    assert set(more) <= {row.row for row in rest}
    assert all(await queue.complete(rest, "score"))
    assert await queue.claim("grade", timeout=0.2) == []
    await queue.claim_all("check", 8)


async def test_tasks_go_on_while_the_primary_is_away(queue):
    await queue.put(4)
    leased = await queue.claim_all("grade", 4)
    await queue.complete(leased[:1], "score")
    leased += await queue.claim("check", rows=1)
    await queue.stop_controller(0)
    assert all(await queue.complete(leased[1:4], "score"))
    await queue.start_controller(0)
    assert {row.row for row in await queue.claim_all("check", 3)} == {row.row for row in leased[1:4]}


async def test_rows_that_end_end_for_every_task(queue):
    rows = await queue.put(4)
    leased = await queue.claim_all("grade", 4)
    assert await queue.client.drop(leased[:1], reason="bad", timeout=10) == [True]
    assert await Partition(queue.client, P).clear([leased[1].row], timeout=10) == 1
    assert await queue.client.drop(leased[:1], reason="bad", timeout=10) == [False]
    sight = await Partition(queue.client, P).peek(task="check", timeout=10)
    assert sight.rows == [row for row in rows if row not in (leased[0].row, leased[1].row)]
    assert await queue.complete(leased[1:], "score") == [False, True, True]
    stats = await queue.client.stats(timeout=10)
    assert (stats.live, stats.dropped) == (2, 1)
    assert stats.leased == {f"{P}/grade": 0, f"{P}/check": 0, f"{P}/read": 0}
    assert stats.ready[f"{P}/check"] == 2


async def test_a_drop_that_comes_late_takes_no_row_from_a_step_nor_from_another_partition(queue):
    gang = TaskSpec(partition=P, name="train", needs=["text"], kind="gang")
    await queue.client.declare([gang], timeout=10)
    await queue.client.open_step(partition=P, step=1, groups=1, group_size=2, timeout=10)
    await queue.client.begin(partition=P, attempt=0, step=0, world=1, timeout=10)
    rows = await queue.put(4, group_size=2, samples=Samples(serials=[0, 1], step=1))
    slot = await queue.client.slot(partition=P, attempt=0, step=1, slot=0, rank=0, tokens=9, timeout=10)
    bound = {row.row for row in slot.rows}
    replica = RpcClient(name="controller 1", resolve=queue.of(0))
    for partition in ("other", P):
        drop = DropRows(partition, 1, [*rows, 7], "late")
        dropped = await replica.call("replicas.drop", drop, list[bool], timeout=10)
        assert dropped == [partition == P and row not in bound for row in rows] + [False]
    await replica.close()
    assert len(bound) == (await queue.client.stats(timeout=10)).dropped == 2


async def test_rows_of_a_lost_unit_are_made_again_and_go_through_once(tmp_path):
    queue = Replicated(tmp_path, units=1)
    try:
        await queue.start()
        await queue.put(3, keys=["a", "b", "c"])
        first = await queue.claim_all("grade", 3)
        assert all(await queue.complete(first[:2], "score"))
        await queue.units[0].close()
        await queue.start_unit(0)
        assert await queue.complete(first[2:], "score") == [False]
        wanted = await queue.client.wanted(partition=P, known=0, timeout=10)
        assert len(wanted.keys) == 3
        again = await queue.put(3, keys=["a", "b", "c"])
        assert {row.row for row in await queue.claim_all("grade", 3)} == set(again)
    finally:
        await queue.close()


async def test_a_replica_confirms_no_completion_that_is_not_safe(tmp_path, disk):
    queue = Replicated(tmp_path, count=2, units=1, sync="always")
    try:
        await queue.start()
        await queue.put(2)
        first, second = await queue.claim_all("grade", 2)
        assert await queue.complete([first], "score") == [True]
        disk.stop()
        completing = asyncio.create_task(queue.complete([second], "score"))
        async with asyncio.timeout(10):
            while queue.controllers[1].table.state.leases:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not completing.done()
        disk.go_on()
        assert await completing == [True]
    finally:
        disk.go_on()
        await queue.close()


async def test_a_column_has_one_dtype_whoever_writes_it_first(queue):
    more = [TaskSpec(partition=P, name=name, needs=["text"], writes=["score"]) for name in ("fill", "other")]
    await queue.client.declare(more, timeout=10)
    await queue.put(2)
    one, other = await queue.claim("grade", rows=1), await queue.claim("other", rows=2)
    assert places(queue)["other"] == 2
    texts = Jagged.from_rows([[1.5]] * 2, "float64")
    ok, refused = await asyncio.gather(
        queue.complete(one, "score"),
        queue.client.complete(other, {"score": texts}, timeout=10),
        return_exceptions=True,
    )
    assert (ok == [True]) != (refused == [True, True])
    assert any(isinstance(result, Refused) and "one dtype" in result.hint for result in (ok, refused))


async def test_a_new_column_that_waits_for_the_primary_holds_up_no_other_completion(queue):
    await queue.client.declare([TaskSpec(partition=P, name="fill", needs=["text"], writes=["new"])], timeout=10)
    assert places(queue)["fill"] == places(queue)["grade"] == 1
    await queue.put(4)
    graded = await queue.claim_all("grade", 4)
    assert all(await queue.complete(graded[:1], "score"))
    filled = await queue.claim_all("fill", 4)
    await queue.stop_controller(0)
    filling = asyncio.create_task(queue.complete(filled, "new", timeout=30))
    await asyncio.sleep(0.1)
    assert all(await queue.complete(graded[1:], "score"))
    assert not filling.done()
    await queue.start_controller(0)
    assert all(await filling)
    async with asyncio.timeout(10):  # a snapshot of before may come after the column was entered
        while len({queue.controllers[index].table.state.partitions[P].schema.get("new") for index in (0, 1)}) > 1:
            await asyncio.sleep(0.02)
    assert "new" in queue.controllers[0].table.state.partitions[P].schema


async def test_what_was_given_back_unfinished_comes_with_the_next_lease(queue):
    await queue.put(1)
    leased = await queue.claim("grade")
    part = {"score": Jagged.from_rows([[5]], "int64")}
    assert await queue.client.give_back(leased, reason="half", columns=part, timeout=10) == [True]
    (row,) = await queue.claim("grade")
    assert (row.attempt, row.bytes["score"]) == (1, 8)


async def test_what_was_saved_of_a_row_comes_with_the_next_lease(queue):
    await queue.put(1)
    leased = await queue.claim("grade")
    assert await queue.client.save(leased, {"score": Jagged.from_rows([[5]], "int64")}, timeout=10) == [True]
    await queue.client.expire(worker="test", timeout=10)
    (row,) = await queue.claim("grade")
    assert (row.attempt, row.bytes["score"]) == (1, 8)
    assert await queue.client.save(leased, {"score": Jagged.from_rows([[6]], "int64")}, timeout=10) == [False]


async def test_leases_are_renewed_completed_and_expired_where_they_are(queue):
    reading = TaskSpec(partition=P, name="count", needs=["text"])
    await queue.client.declare([reading], timeout=10)
    await queue.put(6)
    batch = (await queue.client.claim(partition=P, task="count", max_rows=2, timeout=10)).rows
    held = await queue.claim("grade", rows=2)
    leases = [batch[0].lease, held[0].lease, "ff"]
    assert sorted(await queue.client.renew(leases, timeout=10)) == sorted(leases[:2])
    more = await queue.client.claim(partition=P, task="count", max_rows=9, timeout=10)
    assert len(more.rows) == 4
    assert await queue.client.complete([*batch, *more.rows], {}, timeout=10) == [True] * 6
    assert (await Partition(queue.client, P).consumed("count", timeout=10)).all
    await queue.client.expire(worker="test", timeout=10)
    assert {row.row for row in await queue.claim_all("grade", 6)} >= {row.row for row in held}


async def test_a_snapshot_counts_the_groups_that_a_task_has_yet_to_do_wherever_it_is(queue):
    await queue.put(6, group_size=2, samples=Samples(serials=[0, 1, 2], step=1))
    leased = await queue.claim_all("grade", 6)
    kept = [row for row in leased if row.meta.sample or row.meta.serial == 2]
    await queue.client.drop([row for row in leased if row not in kept], reason="dropped", timeout=10)
    await queue.complete([row for row in kept if row.meta.serial != 1], "score")
    step = (await queue.client.snapshot(partition=P, timeout=10)).steps[1]
    assert step.undone == {"grade": 1, "check": 3, "read": 3}
    assert step.done == {"grade": 3, "check": 0, "read": 0}


async def test_questions_about_a_task_are_no_older_than_they_are(queue):
    for count in range(1, 6):
        await queue.put(1)
        assert (await Partition(queue.client, P).consumed("check", timeout=10)).rows == count


async def test_a_replica_says_what_it_knows_as_soon_as_it_does(queue):
    feed, replica = queue.controllers[0].handlers.feed, RpcClient(name="controller 0 for 1", resolve=queue.of(1))

    def reach(position, *, epoch=feed.epoch, wait_s=10):
        asked = Reach(epoch, position, wait_s)
        return asyncio.create_task(replica.call("replicas.reach", asked, bool, timeout=10))

    known, of_another = reach(feed.position + 1), reach(0, epoch=feed.epoch - 1, wait_s=0.1)
    assert not await of_another
    assert not known.done()
    feed.add(WorkerLost("nobody"))
    queue.controllers[0].settle()
    assert await asyncio.wait_for(known, 5)
    assert not await reach(feed.position + 1, wait_s=0)
    await replica.close()


async def test_reset_reaches_every_task(queue):
    await queue.put(3)
    await queue.through(3)
    assert await Partition(queue.client, P).reset(task="grade", timeout=10) == 3
    assert await Partition(queue.client, P).reset(timeout=10) == 6
    view = await queue.client.show(P, timeout=10)
    assert [(task.name, task.ready, task.done) for task in view.tasks] == [
        ("check", 3, 0),
        ("grade", 3, 0),
        ("read", 3, 0),
    ]


async def test_the_audit_reads_all_ledgers_and_counts_rows_once(queue):
    await queue.put(5)
    await queue.through(5)
    leased = await queue.put(1) and await queue.claim("grade")
    await queue.client.give_back(leased, reason="", timeout=10)
    await Partition(queue.client, P).peek(task="grade", timeout=10)
    report = await queue.client.audit(timeout=10)
    assert report.ok, report.problems
    assert (report.put, report.remaining, report.redeliveries, report.peeked) == (6, 6, 1, 6)
    assert audit_ledgers(queue.folder / "ledger") == report
    (row,) = await queue.put(1)
    await queue.claim_all("grade", 2)
    queue.controllers[1].ledger.append([ev.Leased(1 << LEASE_BITS, P, "grade", "another", "ticket", [row])])
    report = await queue.client.audit(timeout=10)
    assert report.problems == [f"controller 1: row {row} of {P} was leased to grade twice, or was lost"]
    assert audit_ledgers(queue.folder / "ledger") == report


async def test_a_replica_that_is_too_far_behind_takes_a_snapshot(queue):
    queue.controllers[0].handlers.feed._limit = 1000
    await queue.put(4)
    await queue.through(4)
    await queue.stop_controller(2)
    rows = [row for _ in range(30) for row in await queue.put(2)]
    cleared = rows[:10]
    assert await Partition(queue.client, P).clear(cleared, timeout=10) == 10
    await queue.start_controller(2)
    for task, column in (("grade", "score"), ("check", "mark")):
        assert all(await queue.complete(await queue.claim_all(task, 50), column))
    await queue.stop_controller(0)
    await queue.stop_controller(2)
    await queue.start_controller(2)
    assert rows[-1] in queue.controllers[2].table.state.rows, "the snapshot is in its ledger"
    await queue.start_controller(0)


async def test_a_replica_that_is_told_what_makes_no_sense_takes_a_snapshot(queue):
    await queue.put(4)
    await queue.through(4)
    queue.controllers[0].handlers.feed.add(ev.RowsGone(P, [8]))
    rows = await queue.put(2)
    assert {row.row for row in await queue.claim_all("grade", 2)} == set(rows)


async def test_a_replica_that_cannot_follow_any_more_stops_serving(queue, monkeypatch):
    monkeypatch.setattr("asyncflow.queue.controller.replica.take", lambda *_: 1 // 0)
    await queue.put(1)
    for replica in (queue.controllers[1], queue.controllers[2]):
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.shield(replica.failed), 10)


async def test_a_snapshot_that_is_too_big_is_refused_and_said(queue, monkeypatch, caplog):
    monkeypatch.setattr("asyncflow.queue.table.replication._MOST", 500)
    await queue.put(30)
    await queue.stop_controller(2)
    await queue.start_controller(2)
    async with asyncio.timeout(10):
        while "30 rows are" not in caplog.text:
            await asyncio.sleep(0.02)
    assert not queue.controllers[2].handlers.ready()[0]
    assert len(await queue.claim_all("grade", 30)) == 30
    monkeypatch.undo()
    async with asyncio.timeout(10):
        while not queue.controllers[2].handlers.ready()[0]:
            await asyncio.sleep(0.02)


async def test_a_question_about_a_task_whose_replica_is_gone_names_it(queue, monkeypatch):
    monkeypatch.setattr("asyncflow.queue.controller.primary._REPLY_S", 0.2)
    await queue.stop_controller(1)
    asking = RpcClient(name="test", resolve=queue.of(0))
    with pytest.raises(DeadlineExceeded, match="controller 1"):
        await asking.call("open.progress", AskProgress(P, [], "grade"), Progress, timeout=10)
    await asking.close()
    assert (await Partition(queue.client, P).consumed("read", timeout=10)).done == 0


@pytest.mark.parametrize("how", ["gone", "stopped"])
async def test_who_looks_is_told_what_the_others_say_and_which_controller_is_silent(queue, monkeypatch, how):
    monkeypatch.setattr("asyncflow.queue.controller.primary._REPLY_S", 0.5)
    monkeypatch.setattr("asyncflow.queue.controller.primary._RESPONSIVE_S", 0.5)
    await queue.put(3)
    assert (await queue.client.stats(timeout=10)).silent == []
    assert (await queue.client.show(P, timeout=10)).silent == {}
    await queue.stop_controller(1)
    async with contextlib.AsyncExitStack() as stack:
        if how == "stopped":
            mute = await stack.enter_async_context(await asyncio.start_server(lambda *_: None, "127.0.0.1"))
            address = "tcp://{}:{}".format(*mute.sockets[0].getsockname())
            queue.controllers[1] = SimpleNamespace(server=SimpleNamespace(address=address))
        stats, view = await asyncio.gather(queue.client.stats(timeout=10), queue.client.show(P, timeout=10))
        assert stats.silent == [1]
        assert sorted(stats.ready) == [f"{P}/check", f"{P}/read"]
        assert view.silent == {1: ["grade"]}
        assert ([task.name for task in view.tasks], view.rows) == (["check", "read"], 3)
        for whole in (queue.client.audit, lambda **options: queue.client.snapshot(partition=P, **options)):
            with pytest.raises(DeadlineExceeded, match="controller 1"):
                await whole(timeout=2)
        queue.controllers[1] = None


async def test_the_primary_tells_for_how_long_a_controller_has_asked_nothing(queue, monkeypatch):
    monkeypatch.setattr("asyncflow.queue.controller.replica._PARK_S", 0.05)
    await queue.put(1)
    await queue.stop_controller(1)
    primary = queue.controllers[0]
    async with asyncio.timeout(10):
        while not (silent := primary.handlers.silences())[1] >= 0.5 > silent[2]:
            await asyncio.sleep(0.05)
    metrics = ControllerMetrics()
    _show(primary, metrics)
    shown = metrics.registry.get_sample_value("asyncflow_controller_silence_seconds", {"controller": "1"})
    assert shown >= 0.5
    assert queue.controllers[2].handlers.silences() == {}
    unknown = RpcClient(name="controller 3", resolve=queue.of(0))
    with pytest.raises(Refused, match="there is no controller 3"):
        await unknown.call("replicas.follow", Follow(3, 0, 0, 0), Feed, timeout=10)
    await unknown.close()


async def test_a_write_under_a_lease_of_a_controller_that_there_is_not_is_refused_and_leaves_nothing(queue):
    (row,) = await queue.put(1)
    (leased,) = await queue.claim("grade")
    held = [unit.holdings.budget.used for unit in queue.units.values()]
    nobodys = msgspec.structs.replace(leased, lease=f"{(3 << LEASE_BITS) + 1:x}")
    assert await queue.client.complete([nobodys], {"score": encode([1.0])}, timeout=10) == [False]
    assert [unit.holdings.budget.used for unit in queue.units.values()] == held
    assert not any(unit.holdings.puts for unit in queue.units.values())
    assert await queue.client.complete([leased], {"score": encode([1.0])}, timeout=10) == [True]
    assert leased.row == row


async def test_a_row_cleared_before_the_replica_knows_is_stale(queue):
    rows = await queue.put(1)
    leased = await queue.claim("grade")
    await Partition(queue.client, P).clear(rows, timeout=10)
    with pytest.raises(StaleHandle):
        await queue.client.fetch(leased, ["text"], timeout=10)
    assert await queue.complete(leased, "score") == [False]


@pytest.mark.parametrize("restart", [None, 0, 1])
async def test_rows_that_replicas_have_leased_move_and_replicas_say_where_they_lie(queue, restart):
    await queue.start_unit(2)
    rows = [row for _ in range(12) for row in await queue.put(2)]
    leased = await queue.claim_all("grade", 24)
    writing = asyncio.create_task(queue.complete(leased[:9], "score"))
    leaving = asyncio.create_task(queue.units[1].leave())
    if restart is not None:
        await queue.stop_controller(restart)
        await queue.start_controller(restart)
    async with asyncio.timeout(20):
        assert await leaving
    assert all(await writing)
    await queue.units.pop(1).close()
    assert all(await queue.complete(leased[9:], "score"))
    checked = await queue.claim_all("check", 24)
    assert all(await queue.complete(checked, "mark"))
    read = await queue.claim_all("read", 24)
    assert {row.unit for row in read} == {0, 2}
    fetched = await queue.client.fetch(rows, ["text", "score", "mark"], timeout=10)
    assert [int(cell[0]) for cell in fetched["mark"].rows()] == rows
    assert all(await queue.complete(read))
    assert audit_ledgers(queue.folder / "ledger").ok
