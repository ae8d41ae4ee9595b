"""A queue on sockets in a thread, or a process, of its own, for clients that block or fork."""

import asyncio
import multiprocessing
import threading

from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer


class Cluster:
    """A controller and units in a thread of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.controller = None
        self.units = {}
        self.clients = []
        self.start_controller()

    def start_controller(self):
        async def start():
            controller = Controller(ledger_dir=self.folder)
            await controller.start()
            self.controller = controller

        self.run(start())

    def stop_controller(self):
        controller, self.controller = self.controller, None
        self.run(controller.close())

    def start_unit(self, index):
        async def start():
            unit = StorageUnit(index=index, limit_bytes=1 << 22, controller=self.address)
            await unit.start()
            await unit.joined(10)
            return unit

        self.units[index] = self.run(start())

    def address(self):
        return self.controller.server.address if self.controller else None

    def find(self, role, index):
        if role == "controller":
            return self.address()
        return self.units[index].server.address if index in self.units else None

    def connect(self, worker="test"):
        self.clients.append(
            BlockingQueue(
                lambda: QueueClient(
                    find=self.find,
                    units=lambda: sorted(self.units),
                    worker=worker,
                )
            )
        )
        return self.clients[-1]

    def run(self, job):
        return asyncio.run_coroutine_threadsafe(job, self.loop).result(30)

    def close(self):
        for client in self.clients:
            client.close()
        for unit in self.units.values():
            self.run(unit.close())
        if self.controller:
            self.stop_controller()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Alone(Cluster):
    """A queue that stands alone: controller and units are members of a directory, at one address."""

    def __init__(self, folder):
        self.members = {}
        super().__init__(folder)

    def start_controller(self):
        super().start_controller()
        if not self.members:
            self.run(self.serve_directory())
        self.join("controller", 0, self.address())

    async def serve_directory(self):
        self.front = RpcServer(name="directory")
        self.directory = Directory(heartbeat_s=0.1, lost_after_s=1.0)
        self.directory.attach(self.front)
        self.directory.on_leave.append(self.gone)
        self.one_address = await self.front.start()

    def gone(self, member, _reason):
        if self.controller:
            self.controller.handlers.expire(member.incarnation)

    def start_unit(self, index):
        super().start_unit(index)
        self.join("storage", index, self.units[index].server.address)

    def join(self, role, index, address):
        async def join():
            if before := self.members.pop((role, index), None):
                await before.close()
            member = Member(role=role, index=index, incarnation=f"{role}-{index}-{address}", address=address)
            self.members[role, index] = membership = Membership(driver=self.one_address, member=member)
            await membership.join(10)

        self.run(join())

    def close(self):
        for member in self.members.values():
            self.run(member.close())
        self.run(self.directory.close())
        self.run(self.front.close())
        super().close()


class Elsewhere:
    """An ``Alone`` in a process of its own, which shares no descriptor with those that a test forks."""

    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(folder, theirs), daemon=True)
        self.process.start()
        self.address = self.pipe.recv()

    def restart_controller(self):
        self.pipe.send("restart")
        self.pipe.recv()

    def close(self):
        self.pipe.send("close")
        self.process.join(30)


def _serve(folder, pipe):
    made = Alone(folder)
    for index in range(2):
        made.start_unit(index)
    pipe.send(made.one_address)
    while pipe.recv() == "restart":
        made.stop_controller()
        made.start_controller()
        pipe.send("done")
    made.close()
