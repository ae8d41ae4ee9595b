"""A controller and units that answer what a test says, on real sockets, in a thread of their own."""

import asyncio
import threading
from contextlib import contextmanager

from msgspec import Struct

from asyncflow.errors import Refused
from asyncflow.rpc.server import RpcServer


class Say(Struct, frozen=True):
    word: str


class Heard(Struct, frozen=True):
    word: str


class World:
    """Servers by unit (None: the controller). answers: what each does with a word; calls: what came, in order."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.servers = {}
        self.calls = []
        self.cancelled = []

    def start(self, unit, **options):
        server = RpcServer(name=f"server {unit}", **options)
        server.route("say", Say, lambda call, frames: self._answer(unit, call.word, frames))
        self.run(server.start())
        self.servers[unit] = server

    def stop(self, unit):
        self.run(self.servers.pop(unit).close())

    def address(self, unit):
        server = self.servers.get(unit)
        return server.address if server else None

    async def _answer(self, unit, word, frames):
        self.calls.append((unit, word))
        try:
            if word == "refused":
                raise Refused("no such word")
            if word == "never":
                await asyncio.sleep(60)
            if word == "slowly":
                await asyncio.sleep(1)
        except asyncio.CancelledError:
            self.cancelled.append(word)
            raise
        return Heard(f"{unit}: {word}"), list(frames)

    def run(self, job):
        return asyncio.run_coroutine_threadsafe(job, self.loop).result(20)

    def close(self):
        for unit in list(self.servers):
            self.stop(unit)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@contextmanager
def world(*units):
    made = World()
    try:
        for unit in units:
            made.start(unit)
        yield made
    finally:
        made.close()
