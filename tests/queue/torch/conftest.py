"""A whole queue that stands alone, in a thread of its own, so that the test can block as a training loop does."""

import asyncio
import threading
import uuid
from contextlib import contextmanager

import numpy as np
import pytest

from asyncflow.local.placement import PortReservation
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.messages import RowMeta, Samples, TaskSpec
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rpc.access import worker_name
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership

P = "train"
LEASE_S = 2.0
TASKS = [
    TaskSpec(partition=P, name="load", needs=["prompt"], lease_s=LEASE_S),
    TaskSpec(partition=P, name="whole", needs=["prompt"], groups=True, lease_s=LEASE_S),
    TaskSpec(partition=P, name="score", needs=["prompt"], writes=["score"], lease_s=LEASE_S),
    TaskSpec(partition=P, name="train", needs=["prompt"], kind="gang", order="key", groups=True),
]


class Served:
    """A queue of two units; ``run`` does something with its ``client`` and gives what comes of it."""

    def __init__(self, folder, *, issuer=None):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._open(folder, issuer))

    def run(self, job):
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(timeout=60)

    def close(self):
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def restart_controller(self):
        self.run(self._restart())

    async def _restart(self):
        await self.directory.close()
        await self.controller.close()
        await self._start()

    async def _start(self):
        self.controller = Controller(
            ledger_dir=self._folder, credentials=self._credentials("controller"), port=self._port
        )
        self.directory = Directory(heartbeat_s=0.5, lost_after_s=3.0)
        self.directory.attach(self.controller.server)
        self.directory.on_leave.append(self._gone)
        self.address = await self.controller.start()

    async def _open(self, folder, issuer):
        self._folder, self._issuer = folder, issuer
        with PortReservation(1) as ports:
            self._port = ports[0]
        await self._start()
        self.members = [await self._join("controller", 0, self.address)]
        self.units = {}
        for index in range(2):
            unit = StorageUnit(
                index=index,
                limit_bytes=1 << 24,
                controller=self.address,
                credentials=self._credentials("storage", index),
            )
            await unit.start()
            await unit.joined(10)
            self.units[index] = unit
            self.members.append(await self._join("storage", index, unit.server.address))
        addresses = {index: unit.server.address for index, unit in self.units.items()}
        self.client = QueueClient(
            find=lambda role, index: self.address if role == "controller" else addresses.get(index),
            units=lambda: sorted(addresses),
            worker="test",
            credentials=self._credentials("client"),
        )
        await self.client.declare(TASKS, timeout=10)

    async def _join(self, role, index, address):
        name = worker_name(role, index, uuid.uuid4().hex)
        member = Member(role=role, index=index, incarnation=name, address=address)
        membership = Membership(driver=self.address, member=member, credentials=self._credentials(role, index))
        await membership.join(10)
        return membership

    def _credentials(self, role, index=0):
        return self._issuer.credentials(role, index) if self._issuer else None

    def _gone(self, member, _reason):
        self.controller.table.claims.expire_worker(member.incarnation)
        self.controller.settle()

    async def _close(self):
        await self.client.close()
        for membership in reversed(self.members):
            await membership.close()
        for unit in self.units.values():
            await unit.close()
        await self.directory.close()
        await self.controller.close()

    def fill(self, serials, *, size=1, step=1, tokens=None, columns=None, close=None):
        """Create groups: sample j of serial s holds ``10 * s + j``, as often as it has tokens."""
        metas = [
            RowMeta(partition=P, serial=s, sample=j, step=step, tokens=tokens(s, j) if tokens else 1 + (s + j) % 3)
            for s in serials
            for j in range(size)
        ]
        prompts = Jagged.from_rows([np.full(m.tokens, 10 * m.serial + m.sample) for m in metas], "int32")
        made = {name: make(metas) for name, make in (columns or {}).items()}
        samples = Samples(serials=list(serials), step=step, tokens=[meta.tokens for meta in metas])
        self.run(self.client.put(P, {"prompt": prompts} | made, group_size=size, samples=samples, timeout=10))
        if close is not None:
            self.close_partition(close)

    def open_step(self, step, groups, *, size=1):
        self.run(self.client.open_step(partition=P, step=step, groups=groups, group_size=size, timeout=10))

    def close_partition(self, step):
        self.run(self.client.close_partition(partition=P, step=step, timeout=10))

    def client_count(self):
        """Return how many clients are there."""

        async def count():
            return len(self.directory.members("client"))

        return self.run(count())

    def stats(self):
        return self.run(self.client.stats(timeout=10))


@contextmanager
def serve(folder, **options):
    served = Served(folder, **options)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture
def served(tmp_path):
    with serve(tmp_path / "ledger") as queue:
        yield queue


@pytest.fixture
def serving(tmp_path):
    return lambda **options: serve(tmp_path / "ledger", **options)
