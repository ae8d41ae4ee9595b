"""The ledger on disk: what is confirmed is read back, what was torn is cut away, what is damaged is said."""

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from typing import get_args

import msgspec
import pytest

from asyncflow.errors import LedgerCorrupt, Refused
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.ledger.events import Committed, Completed, Declared, Event
from asyncflow.queue.ledger.log import Ledger, newest, pack, read_ledger
from asyncflow.queue.protocol.calls import AskSlot
from asyncflow.queue.table.apply import APPLY, QueueState
from asyncflow.queue.table.snapshot import snapshot

P = "train"


def history(queue):
    """Return the events of a small life with everything in it."""
    training = queue.table.training
    for step in (1, 2):
        training.open_step(P, step, 2, 2)
    training.begin(P, 0, 0, 2)
    queue.create(0, 1)
    queue.create(2, 3, step=2)
    queue.through(upto="score")
    training.exchange(P, 2, 1, 1)
    rows = queue.claim("advantage", rows=2)
    queue.table.claims.drop(rows[0].lease, [rows[0].row], "filtered:test")
    queue.table.give_back(rows[1].lease, [rows[1].row], "test")
    queue.through()
    slot = 0
    while not training.slot(AskSlot(P, attempt=0, step=1, slot=slot, rank=0, tokens=2, wait_s=0)).last:
        slot += 1
    for rank in (0, 1):
        training.step_done(P, 0, 1, rank)
    training.commit(P, 0, 1)
    training.begin(P, 1, 1, 1)
    training.slot(AskSlot(P, attempt=1, step=2, slot=0, rank=0, tokens=2, wait_s=0))
    queue.replace_unit("unit-b")
    training.begin(P, 2, 1, 1)
    queue.create_wanted()
    queue.claim("rollout")
    queue.table.close(P, 1)
    return queue.events()


def applied(events):
    state = QueueState()
    for event in events:
        state.apply(event)
    return list(snapshot(state))


def test_a_crash_at_any_byte_leaves_a_prefix_of_what_happened(queue, tmp_path):
    events = history(queue)
    assert len({type(event) for event in events}) >= 13
    records = [pack(event) for event in events]
    ends = [sum(map(len, records[: n + 1])) for n in range(len(records))]
    path = tmp_path / "000000000001.wal"
    path.write_bytes(b"".join(records))
    for size in reversed(range(ends[-1] + 1)):
        os.truncate(path, size)
        whole = sum(end <= size for end in ends)
        assert list(read_ledger(tmp_path)) == events[:whole]


def test_what_is_read_back_is_the_state_that_was_left(queue):
    state = QueueState()
    live = []
    for event in history(queue):
        state.apply(event)
        live.append(list(snapshot(state)))
    events = queue.events()
    for number in range(len(events)):
        assert (
            applied(msgspec.msgpack.decode(pack(event)[12:], type=Event) for event in events[: number + 1])
            == live[number]
        )


def test_a_torn_end_is_cut_away_and_writing_goes_on(queue, tmp_path):
    events = history(queue)
    data = b"".join(map(pack, events))
    path = tmp_path / "000000000001.wal"
    path.write_bytes(data[:-3])
    ledger = Ledger(tmp_path)
    assert list(ledger.recover()) == events[:-1]
    assert path.stat().st_size == len(data) - len(pack(events[-1]))


def test_zeros_after_a_power_failure_are_a_torn_end(queue, tmp_path):
    events = history(queue)
    (tmp_path / "000000000001.wal").write_bytes(b"".join(map(pack, events)) + bytes(4096))
    assert list(read_ledger(tmp_path)) == events


def test_damage_with_a_sound_record_behind_it_is_refused(queue, tmp_path):
    events = history(queue)
    data = b"".join(map(pack, events))
    path = tmp_path / "000000000001.wal"
    rng = random.Random(7)
    for _ in range(300):
        damaged = bytearray(data)
        place = rng.randrange(len(data) - len(pack(events[-1])))
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(LedgerCorrupt, match="is damaged"):
            list(read_ledger(tmp_path))


@pytest.mark.parametrize("other", [b"AF2", b"AF4"])
@pytest.mark.parametrize("torn", [0, 3])
async def test_a_ledger_of_another_format_is_refused_and_not_changed(queue, tmp_path, other, torn):
    path = tmp_path / "000000000001.wal"
    data = b"".join(map(pack, history(queue))).replace(b"\xa5AF3", b"\xa5" + other)
    path.write_bytes(data[: len(data) - torn])
    refused = f"has the format {other.decode()}, but this version reads and writes AF3.*start with an empty folder"
    with pytest.raises(LedgerCorrupt, match=refused):
        await Controller(ledger_dir=tmp_path).start()
    with pytest.raises(LedgerCorrupt, match=refused):
        audit_ledger(tmp_path)
    assert path.read_bytes() == data[: len(data) - torn]
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "lock"}


def test_every_event_can_be_applied():
    assert set(get_args(Event)) == APPLY.keys()


def test_records_that_do_not_follow_are_refused():
    with pytest.raises(LedgerCorrupt, match="does not follow"):
        QueueState().apply(Completed(99, [1]))


async def test_compaction_keeps_the_state_and_one_file(queue, tmp_path):
    events = history(queue)
    state = QueueState()
    ledger = Ledger(tmp_path, compact=lambda: snapshot(state), limit=100)
    list(ledger.recover())
    ledger.begin([])
    for event in events:
        state.apply(event)
        ledger.append([event])
        await ledger.flushed()
    await ledger.close()
    assert int(newest(tmp_path).stem) > 1
    assert len(list(tmp_path.glob("*.wal"))) == 1
    assert not list(tmp_path.glob("*.draft"))
    assert applied(read_ledger(tmp_path)) == applied(events)


async def test_calls_that_come_together_share_a_sync(tmp_path):
    ledger = Ledger(tmp_path, sync="always")
    list(ledger.recover())
    ledger.begin([])
    syncs = []
    original = os.fdatasync

    def fdatasync(fd):
        syncs.append(fd)
        original(fd)

    async def call(step):
        ledger.append([Committed(P, step)])
        await ledger.flushed()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncflow.queue.ledger.log.os.fdatasync", fdatasync)
        await asyncio.gather(*(call(step) for step in range(50)))
    assert 1 <= len(syncs) <= 2
    await ledger.close()
    assert [event.step for event in read_ledger(tmp_path)] == list(range(50))


async def test_a_ledger_that_cannot_be_written_says_so(tmp_path):
    ledger = Ledger(tmp_path)
    list(ledger.recover())
    ledger.begin([])
    os.close(ledger._fd)
    ledger._fd = os.open("/dev/full", os.O_WRONLY)
    ledger.append([Committed(P, 1)])
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            await ledger.flushed()
    os.close(ledger._fd)


def test_copies_that_somebody_has_put_beside_a_ledger_are_neither_read_nor_removed(queue, tmp_path):
    ledger = Ledger(tmp_path)
    assert list(ledger.recover()) == []
    events = history(queue)
    ledger.begin(events)
    ledger.release()
    copies = [tmp_path / name for name in ("backup.wal", "000000000001-copy.wal", "2.wal")]
    for copy in copies:
        copy.write_bytes(b"older")
    ledger = Ledger(tmp_path)
    assert list(ledger.recover()) == events
    ledger.begin([])
    ledger.release()
    assert newest(tmp_path).name == "000000000002.wal"
    assert [copy.read_bytes() for copy in copies] == [b"older"] * 3


async def test_a_ledger_has_one_writer(tmp_path):
    first = Ledger(tmp_path)
    list(first.recover())
    first.begin([])
    with pytest.raises(Refused, match="another process holds the ledger"):
        list(Ledger(tmp_path).recover())
    await first.close()
    list(Ledger(tmp_path).recover())


WRITER = """
import asyncio, sys
from pathlib import Path
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.ledger.events import Committed
from asyncflow.queue.ledger.log import Ledger

async def main():
    ledger = Ledger(Path(sys.argv[1]))
    for event in ledger.recover():
        pass
    ledger.begin([])
    step = 0
    while True:
        ledger.append([Committed("train", step)])
        await ledger.flushed()
        sys.stdout.write(f"{step}\\n")
        sys.stdout.flush()
        step += 1

asyncio.run(main())
"""


@pytest.mark.process
def test_what_was_confirmed_survives_sigkill(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        for _ in range(200):
            confirmed = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        confirmed = max([confirmed, *(int(line) for line in child.stdout if line.endswith("\n"))])
    steps = [event.step for event in read_ledger(tmp_path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > confirmed


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from asyncflow.errors import Refused
from asyncflow.rpc.client import RpcClient
from asyncflow.queue.protocol import calls
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.messages import TaskSpec

async def main():
    controller = Controller(ledger_dir=Path(sys.argv[1]), sync=sys.argv[2], compact_bytes=int(sys.argv[4]))
    client = RpcClient(name="test", resolve=await controller.start())
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
    for number in range(100_000):
        spec = TaskSpec(partition="p", name=f"t{number % 50}", needs=["x" * (number % 7 + 1)])
        try:
            await client.call("queue.declare", calls.Declare([spec]), calls.Done, timeout=10)
        except Refused as error:
            print(error)
            assert isinstance(controller.failed.exception(), OSError)
            break
        print(number, flush=True)
    await client.close()
    await controller.close()

asyncio.run(main())
"""


def fill_the_disk(folder, sync, *, limit, compact):
    command = [sys.executable, "-c", FULL_DISK, str(folder), sync, str(limit), str(compact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *numbers, last = done.stdout.splitlines()
    return [int(number) for number in numbers], last


@pytest.mark.process
@pytest.mark.parametrize("sync", ["process", "interval", "always"])
def test_on_a_full_disk_the_controller_says_so_and_keeps_what_it_answered(tmp_path, sync):
    answered, error = fill_the_disk(tmp_path, sync, limit=20_000, compact=1 << 30)
    assert "the ledger cannot be written" in error
    assert "nothing that was answered is lost" in error
    assert len(answered) > 50
    declared = [event.spec.name for event in read_ledger(tmp_path) if isinstance(event, Declared)]
    assert declared == [f"t{number % 50}" for number in answered]
    assert newest(tmp_path).stat().st_size == sum(len(pack(event)) for event in read_ledger(tmp_path))


@pytest.mark.process
def test_a_compaction_that_finds_no_room_stops_nothing(tmp_path):
    tried = []

    def compact():
        tried.append(True)
        return iter([Committed(P, n) for n in range(5000)])

    ledger = Ledger(tmp_path, limit=100, compact=compact)
    list(ledger.recover())
    ledger.begin([])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        for step in range(200):
            ledger.append([Committed(P, step)])
            assert ledger.commit() is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(tried) < 10, "whenever the file has doubled, and not at every commit"
    assert [event.step for event in read_ledger(tmp_path)] == list(range(200))
    assert not list(tmp_path.glob("*.draft"))
    for step in range(200, 1000):
        ledger.append([Committed(P, step)])
        ledger.commit()
    assert int(newest(tmp_path).stem) > 1


async def test_answers_wait_for_the_sync_that_covers_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("asyncflow.queue.ledger.log.os.fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    ledger = Ledger(tmp_path, sync="always")
    list(ledger.recover())
    ledger.begin([])
    ledger.append([Committed(P, 1)])
    first = ledger.commit()
    await asyncio.sleep(0)
    assert not synced or not first.done()
    assert ledger.commit() is first
    ledger.append([Committed(P, 2)])
    second = ledger.commit()
    assert second is not first
    await asyncio.wait_for(second, 10)
    assert first.done()
    assert synced[-1] == ledger.bytes
    assert ledger.commit() is None
    assert ledger.lag() == 0.0
    await ledger.close()


@pytest.mark.parametrize(("limit", "appended"), [(0, 11), (25, 16)])
def test_a_ledger_is_compacted_when_it_is_over_its_limit_and_over_twice_what_it_was(tmp_path, limit, appended):
    """In records of one size, of which a compaction leaves ten."""
    state = [Committed(P, step) for step in range(10)]
    ledger = Ledger(tmp_path, limit=limit * len(pack(state[0])), compact=lambda: state)
    list(ledger.recover())
    ledger.begin(state)
    first = newest(tmp_path)
    for _ in range(2):
        for number in range(appended):
            assert (newest(tmp_path), number) == (first, number)
            ledger.append(state[:1])
            ledger.commit()
        assert newest(tmp_path) != first
        first = newest(tmp_path)
    ledger.release()


@pytest.mark.parametrize("sync", ["interval", "always"])
async def test_a_disk_that_holds_up_is_told_as_lag_until_it_has_all(tmp_path, monkeypatch, sync):
    slow = threading.Event()
    monkeypatch.setattr("asyncflow.queue.ledger.log._INTERVAL_S", 0.0)
    monkeypatch.setattr("asyncflow.queue.ledger.log.os.fdatasync", lambda _: slow.wait(10))
    ledger = Ledger(tmp_path, sync=sync)
    list(ledger.recover())
    ledger.begin([])
    assert ledger.lag() == 0.0
    ledger.append([Committed(P, 1)])
    confirmed = [ledger.commit()]
    await asyncio.sleep(0.02)
    ledger.append([Committed(P, 2)])
    confirmed.append(ledger.commit())
    await asyncio.sleep(0.02)
    assert 0.04 <= ledger.lag() < 5
    slow.set()
    if sync == "always":
        await asyncio.gather(*confirmed)
    else:
        assert confirmed == [None, None], "nobody waits for the disk"
    async with asyncio.timeout(5):
        while ledger.lag():
            await asyncio.sleep(0)
    assert ledger.syncs == 2
    assert 0.04 <= ledger.sync_s < 5
    await ledger.close()
