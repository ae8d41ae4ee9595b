"""Attacks on stand-alone queues. Each receives a folder, dice and a shim, and raises Harmed if it did harm."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flow import Flow
from jobs import Harmed
from serve import address_in
from shim import Shim

from asyncflow.errors import AsyncFlowError
from asyncflow.identity import RowPlace
from asyncflow.queue.blocking import BlockingPartition, BlockingQueue
from asyncflow.queue.client import QueueClient
from asyncflow.queue.peers import Peer
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.protocol.unit_calls import Cells, NewRows, PutRows, RowIds
from asyncflow.queue.table.rows import put
from asyncflow.queue.table.table import Table
from asyncflow.rpc.columns import Jagged

sys.path += [str(Path(__file__).parents[1] / "queue"), str(Path(__file__).parents[2] / "hack")]
from servers import Servers, servers

from cut_links import Proxy

SERVE = Path(__file__).with_name("serve.py")
MIB = 1 << 20
CLIENTS = 200_000


class Pair:
    """A controller, which a shim attacks, and a unit, each in its own process."""

    def __init__(self, folder: Path, shim: Shim | None = None) -> None:
        self.folder = folder
        self._shim = shim
        self.restarts = -1
        self._unit = self._start("unit", None)
        self.start_controller()
        self.ready("unit")

    def start_controller(self) -> None:
        """Start the controller, or restart it."""
        self.restarts += 1
        self.controller = self._start("controller", self._shim)

    @contextlib.contextmanager
    def kept_up(self) -> Iterator[None]:
        """Restart the controller whenever it has ended, until the context ends."""
        stop = threading.Event()

        def restart() -> None:
            while not stop.wait(0.1):
                if self.controller.poll() is not None:
                    self.start_controller()

        restarter = threading.Thread(target=restart)
        restarter.start()
        try:
            yield
        finally:
            stop.set()
            restarter.join()

    def connect(self) -> BlockingQueue:
        return connect(address_in(self.folder / "controller"), address_in(self.folder / "unit"))

    def close(self) -> None:
        for process in (self.controller, self._unit):
            process.kill()
            process.wait(20)

    def _start(self, role: str, shim: Shim | None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{role}.log").open("ab") as log:
            words = [sys.executable, str(SERVE), role, str(self.folder)]
            return subprocess.Popen(
                words, stdout=log, stderr=log, env=shim.env if shim is not None else dict(os.environ)
            )

    def ready(self, role: str) -> None:
        """Wait until a process has written its address."""
        deadline = time.monotonic() + 60
        while not (self.folder / role).exists():
            if time.monotonic() > deadline:
                raise Harmed(f"the {role} did not start")
            time.sleep(0.02)


def connect(controller: Callable[[], str | None], unit: Callable[[], str | None]) -> BlockingQueue:
    """Return a client of a controller and a unit with these addresses."""
    return BlockingQueue(
        lambda: QueueClient(
            find=lambda role, _: controller() if role == "controller" else unit(),
            units=lambda: [0],
            worker=uuid.uuid4().hex,
        )
    )


def broken_compaction(folder: Path, dice: random.Random, shim: Shim) -> str:
    """Make the ledger's disk fail for short times during constant compaction; restart the controller."""
    pair = Pair(folder, shim)

    def meanwhile() -> None:
        until = time.monotonic() + 12.0
        while time.monotonic() < until:
            time.sleep(dice.uniform(0.05, 0.4))
            shim.fail_for(dice.uniform(0.001, 0.03), dice.choice([errno.EIO, errno.ENOSPC]), "/ledger")

    flow = Flow(pair.connect)
    try:
        with pair.kept_up():
            flow.run(meanwhile)
    finally:
        pair.close()
    generation = max(int(path.stem) for path in (folder / "ledger").glob("*.wal"))
    return f"{len(flow.put)} rows, {generation} generations of the ledger, {pair.restarts} restarts"


def cut_streams(folder: Path, dice: random.Random, _shim: Shim) -> str:
    """Cut all streams after a random number of bytes."""
    with _proxied(folder, dice) as (proxies, flow):
        for proxy in proxies:
            proxy.cut_every = dice.choice([2_000, 10_000, 50_000])
        flow.run(lambda: time.sleep(10.0))
        return f"{len(flow.put)} rows, {sum(proxy.cuts for proxy in proxies)} cuts"


def partitions(folder: Path, dice: random.Random, _shim: Shim) -> str:
    """Make one or both servers unreachable for a while, shorter or longer than the leases."""
    spans: list[float] = []

    def meanwhile() -> None:
        for _ in range(3):
            time.sleep(dice.uniform(0.2, 1.0))
            cut_off = dice.sample(proxies, dice.randint(1, len(proxies)))
            spans.append(dice.uniform(0.2, 6.0))
            for proxy in cut_off:
                proxy.hold()
            time.sleep(spans[-1])
            for proxy in cut_off:
                proxy.go_on()

    with _proxied(folder, dice) as (proxies, flow):
        flow.run(meanwhile)
        return f"{len(flow.put)} rows, out of reach for {', '.join(f'{span:.1f}' for span in spans)} s"


@contextlib.contextmanager
def _proxied(folder: Path, dice: random.Random) -> Iterator[tuple[list[Proxy], Flow]]:
    pair = Pair(folder)
    pair.ready("controller")
    proxies = [Proxy((folder / role).read_text(), dice) for role in ("controller", "unit")]
    controller, unit = proxies
    try:
        yield proxies, Flow(lambda: connect(lambda: controller.address, lambda: unit.address))
    finally:
        for proxy in proxies:
            proxy.close()
        pair.close()


def forked_clients(_folder: Path, dice: random.Random, _shim: Shim) -> str:
    """Fork a client several times. All processes put and claim, and the controller is killed meanwhile."""
    with servers(units=2) as made, made.handle.connect() as queue:
        rows = BlockingPartition(queue, "forks")
        rows.declare("count", needs=["n"], lease_s=30.0)
        seeds = [dice.randrange(1 << 30) for _ in range(4)]
        pipes = [_fork(rows, seed, 10_000 * (1 + number)) for number, seed in enumerate(seeds[:3])]
        killing = threading.Thread(target=_restart_controller, args=(made, dice.uniform(0.0, 1.5)))
        killing.start()
        put, claimed = _put_and_claim(rows, random.Random(seeds[3]), 0)
        for pid, pipe in pipes:
            with os.fdopen(pipe, "rb") as reader:
                report = json.loads(reader.read() or b"null")
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or report is None:
                raise Harmed("a forked client ended with an error")
            put, claimed = put + report[0], claimed + report[1]
        killing.join()
        claimed += _claim(rows)
        times = Counter(claimed)
        if sorted(claimed) != sorted(put):
            lost, doubled = set(put) - set(claimed), [value for value, count in times.items() if count > 1]
            raise Harmed(f"of {len(put)} rows {len(lost)} are lost, {len(doubled)} came twice")
        return f"{len(put)} rows of 4 clients, one controller killed"


def _fork(rows: BlockingPartition, seed: int, first: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    signal.alarm(150)
    try:
        report = json.dumps(_put_and_claim(rows, random.Random(seed), first)).encode()
        while report:
            report = report[os.write(writer, report) :]
        status = 0
    finally:
        os._exit(status)


def _put_and_claim(rows: BlockingPartition, dice: random.Random, first: int) -> tuple[list[int], list[int]]:
    put: list[int] = []
    claimed: list[int] = []
    while len(put) < 200:
        values = list(range(first + len(put), first + len(put) + dice.randint(1, 5)))
        rows.put({"n": values}, timeout=60)
        put += values
        if dice.random() < 0.3:
            claimed += _claim(rows, most=dice.randint(1, 9))
    return put, claimed + _claim(rows)


def _claim(rows: BlockingPartition, *, most: int = 1 << 30) -> list[int]:
    claimed: list[int] = []
    # A claim is answered at most 5 s after its timeout. On a busy machine, restarting the controller takes that long.
    while len(claimed) < most and (leased := rows.claim("count", 7, timeout=5.0)):
        values = [int(value) for value in rows.get(leased, ["n"], timeout=60)["n"]]
        claimed += [value for value, ok in zip(values, rows.complete(leased, timeout=60), strict=True) if ok]
    return claimed


def _restart_controller(made: Servers, after_s: float) -> None:
    time.sleep(after_s)
    made.processes["controller"].kill()
    made.processes["controller"].wait()
    made.start("controller", attempt=1)


class _TableAnswers:
    """A controller and a unit reduced to the table; some puts are applied twice."""

    def __init__(self, table: Table, dice: random.Random) -> None:
        self._table = table
        self._dice = dice
        self._epoch = table.join_unit(0, "unit")
        self._rows = itertools.count()

    async def call(self, _peer: Peer, _method: str, request: PutRows, _reply: Any, **_options: Any) -> Any:
        """Apply a put to the table, and return its reply."""
        row = RowPlace(self._epoch, 0, next(self._rows)).row
        cells = Cells(dtypes={"x": "int64"}, sizes={"x": [8]})
        for _ in range(1 + (self._dice.random() < 0.01)):
            ok, rows = put(self._table.state, NewRows("p", request.client, request.group, 1, [row], cells, []))
            if list(rows) != [row]:
                raise Harmed(f"row {row} was taken for that of another client: {ok}, {list(rows)}")
        return RowIds([row]), []


def many_clients(_folder: Path, dice: random.Random, _shim: Shim) -> str:
    """Put one row from each of 200,000 clients. Half of the rows are cleared meanwhile, and some puts arrive twice."""
    table = Table()
    table.start(0.0)
    table.declare([TaskSpec(partition="p", name="t", needs=["x"])])
    answers = _TableAnswers(table, dice)
    column = {"x": Jagged(np.zeros(1, np.int64), np.arange(2))}
    living: set[int] = set()

    async def put_all() -> None:
        for _ in range(CLIENTS):
            client = QueueClient(find=lambda *_: None, units=lambda: [0], worker="w")
            client.peers.call = answers.call  # type: ignore[method-assign]
            put = await client.put("p", column, timeout=60.0)
            living.add(put.rows[0])
            if dice.random() < 0.5:
                table.clear_rows("p", [living.pop()])
            table.state.outbox.clear()
            table.state.to_free.clear()

    asyncio.run(put_all())
    if table.state.rows.keys() != living:
        raise Harmed(f"{len(living)} rows should live, {len(table.state.rows)} do")
    return f"{CLIENTS} clients, {len(living)} rows live"


def large_puts(_folder: Path, dice: random.Random, _shim: Shim) -> str:
    """Put up to 80 MiB at once into too little space, while units are killed. A reader must see a whole put or none."""
    stop, seen, harm = threading.Event(), Counter[str](), []
    with servers(units=2, bytes_per_unit="96Mi", shared_memory=dice.random() < 0.5) as made:

        def read() -> None:
            with made.handle.connect() as queue:
                rows = BlockingPartition(queue, "large")
                while not stop.is_set():
                    with contextlib.suppress(AsyncFlowError):
                        found = Counter((tag["put"], tag["of"]) for tag in rows.rows(timeout=5).tags)
                        harm.extend(
                            f"{count} of {of} rows of put {put}" for (put, of), count in found.items() if count != of
                        )
                        seen["looks"] += 1
                    time.sleep(0.005)

        def write(number: int, seed: int) -> None:
            chance = random.Random(seed)
            with made.handle.connect() as queue:
                rows = BlockingPartition(queue, "large")
                for turn in range(12):
                    count, size = chance.randint(4, 20), chance.randint(1, 4)
                    tags = [{"put": 100 * number + turn, "of": count}] * count
                    try:
                        ids = rows.put({"x": [bytes(size * MIB)] * count}, tags=tags, timeout=chance.uniform(0.3, 3.0))
                        seen["put"] += 1
                        if chance.random() < 0.7:
                            rows.clear(ids, timeout=10)
                    except AsyncFlowError:
                        seen["failed"] += 1

        threads = [threading.Thread(target=write, args=(n, dice.randrange(1 << 30))) for n in range(2)]
        reader = threading.Thread(target=read)
        for thread in (*threads, reader):
            thread.start()
        attempts = Counter[str]()
        while any(thread.is_alive() for thread in threads):
            time.sleep(dice.uniform(0.5, 3.0))
            name = f"unit{dice.randrange(2)}"
            made.processes[name].kill()
            made.processes[name].wait()
            attempts[name] += 1
            made.start(name, attempt=attempts[name])
        stop.set()
        for thread in (*threads, reader):
            thread.join()
    if harm:
        raise Harmed(f"half a put was seen: {harm[:3]}")
    return f"{seen['put']} puts, {seen['failed']} that failed, {seen['looks']} looks, {attempts.total()} units killed"


ATTACKS = {
    "forked-clients": forked_clients,
    "broken-compaction": broken_compaction,
    "many-clients": many_clients,
    "large-puts": large_puts,
    "cut-streams": cut_streams,
    "partitions": partitions,
}
