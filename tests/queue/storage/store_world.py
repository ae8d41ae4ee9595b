"""Real stores for tests: Mooncake's master and holders, and Redis, as processes that tests kill, stop and restart."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from asyncflow.queue.storage.backend import Backend, Site
from asyncflow.queue.storage.mooncake import MooncakeBackend, MooncakeConnection, MooncakeStore
from asyncflow.queue.storage.unit import open_backend

PROCESS = Path(__file__).with_name("store_process.py")
START_S = 40.0
MIB = 1 << 20


class Child:
    """A process of ``store_process.py``. address: of its server; pid: of whom to kill, which may be a child of it."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, str(PROCESS), *map(str, words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address, self.pid = "", 0

    def wait(self) -> Child:
        """Wait until it serves."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.end()
            raise RuntimeError(f"{self._process.args} did not start")
        self.address, pid = line.split()
        self.pid = int(pid)
        return self

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it, at once."""
        for pid in {self.pid or self._process.pid, self._process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class MemoryWorld:
    """No process at all."""

    name = "memory"

    def address(self, role: str, index: int) -> str | None:
        return None

    async def backend(self, *, unit: int = 0, **options: Any) -> Backend:
        """Return a backend that is open, of a unit that begins. options: of its ``Site``."""
        site = Site(unit=unit, incarnation=uuid.uuid4().hex, host="127.0.0.1", find=self.address, **options)
        made = open_backend(self.name, site)
        await made.open()
        return made

    def shared(self, site: Site) -> Backend:
        """Return a backend that is not open yet, of a unit that begins."""
        return open_backend(self.name, site)

    def close(self) -> None:
        pass


class LastingConnection(MooncakeConnection):
    """A connection of many units in one process, none of which closes it: each client takes a second to close."""

    def close(self) -> None:
        pass


class MooncakeWorld(MemoryWorld):
    """A master and holders of ``size`` bytes each."""

    name = "mooncake"

    def __init__(self, folder: Path, *, holders: int = 1, size: int = 256 * MIB) -> None:
        self._file = folder / f"master-{uuid.uuid4().hex}"
        self._size = size
        self._connection: LastingConnection | None = None
        self.master = Child("master").wait()
        self._publish()
        self.holders = [self._holder() for _ in range(holders)]
        for holder in self.holders:
            holder.wait()

    def address(self, role: str, index: int) -> str | None:
        return self.master.address if (role, index) == ("master", 0) else None

    def shared(self, site: Site) -> Backend:
        """Return a backend on the one connection of this process."""
        if self._connection is None:
            self._connection = LastingConnection(host=site.host, master=lambda: self.master.address)
        store = MooncakeStore(self._connection, stale="^nothing$")
        return MooncakeBackend(store, prefix=site.prefix, lasting=site.lasting)

    def restart_master(self) -> None:
        """Kill the master; its successor has another address and knows nothing."""
        self.master.end()
        self.master = Child("master").wait()
        self._publish()

    def replace_holder(self, index: int) -> None:
        """Start a successor of a holder."""
        self.holders[index].end()
        self.holders[index] = self._holder().wait()

    def close(self) -> None:
        if self._connection is not None:
            MooncakeConnection.close(self._connection)
        for child in (*self.holders, self.master):
            child.end()

    def _holder(self) -> Child:
        return Child("holder", self._file, self._size)

    def _publish(self) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(self.master.address)
        draft.rename(self._file)


class RedisWorld(MemoryWorld):
    """One server of ``size`` bytes, the holder of whoever asks."""

    name = "redis"

    def __init__(self, *, size: int = 256 * MIB, password: str = "") -> None:
        self._words = ("redis", size, *([password] if password else []))
        self.server = Child(*self._words).wait()

    def address(self, role: str, index: int) -> str | None:
        return self.server.address if role == "holder" else None

    def restart(self) -> None:
        """Kill the server; its successor has another address and is empty."""
        self.server.end()
        self.server = Child(*self._words).wait()

    def close(self) -> None:
        self.server.end()


WORLDS = ("memory", "mooncake", "redis")


def make_world(name: str, folder: Path) -> MemoryWorld:
    """Return a world of its own."""
    if name == "mooncake":
        return MooncakeWorld(folder)
    return RedisWorld() if name == "redis" else MemoryWorld()


def until(happened: object, *, within_s: float = 30.0) -> None:
    """Wait until ``happened()`` says yes."""
    deadline = time.monotonic() + within_s
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
