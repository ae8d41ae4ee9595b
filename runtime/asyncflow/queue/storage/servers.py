"""Mooncake's master and a Redis server, started so that they keep what they are given until it is removed, or say no.

Invariants: nothing is evicted and nothing is written to disk; they listen on the one host that is named; a password is
given where nobody else can read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from asyncflow.errors import DeadlineExceeded, ManifestError, RoleFailed
from asyncflow.process import PARENT

LEASE_MS = 2000
"""For so long a value that was read cannot be removed from Mooncake: this is how late freed bytes may come back."""


def find_mooncake_master() -> str:
    """Return its path. Raises ManifestError where it is not installed."""
    return find_program("mooncake_master", hint="pip install 'asyncflow[mooncake]'")


def find_redis() -> str:
    """Return its path. Raises ManifestError where it is not installed."""
    return find_program("redis-server", hint="Install the system's package redis-server")


async def start_mooncake_master(host: str) -> Server:
    """Start ``mooncake_master``. Raises ManifestError where it is not installed, RoleFailed where it ends at once."""
    program = find_mooncake_master()
    port = free_port(host)
    options = {
        "logtostderr": "true",
        "rpc_address": host,
        "rpc_port": port,
        "metrics_host": host,
        "metrics_port": free_port(host),
        "enable_metric_reporting": "false",
        "enable_http_metadata_server": "false",
        "eviction_high_watermark_ratio": "1.0",
        "eviction_ratio": "0.0",
        "default_kv_lease_ttl": LEASE_MS,
    }
    command = [program, *(f"--{name}={value}" for name, value in options.items())]
    return await Server.start(command, host=host, port=port)


async def start_redis(host: str, *, memory: int, password: str) -> Server:
    """Start ``redis-server`` with so many bytes, for all whose ``password`` is this one; "" lets everybody in.

    Raises ManifestError where it is not installed, RoleFailed where it ends at once.
    """
    program = find_redis()
    port = free_port(host)
    options = {
        "bind": host,
        "port": port,
        "maxmemory": memory,
        "maxmemory-policy": "noeviction",
        "save": '""',
        "appendonly": "no",
        "protected-mode": "yes",
        "loglevel": "warning",
    }
    if password:
        options["requirepass"] = password
    config = "".join(f"{name} {value}\n" for name, value in options.items())
    return await Server.start([program, "-"], host=host, port=port, config=config.encode())


READY_S = 30.0
_AGAIN_S = 0.05
_END_S = 2.0
_STDERR = 2


def free_port(host: str) -> int:
    """Return a port that was free on ``host`` a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def find_program(name: str, *, hint: str) -> str:
    """Return the path of a program, of this Python's environment or of the system. Raises ManifestError."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ManifestError(f"there is no program {name!r}", where="spec.transferQueue.backend", hint=hint)
    return found


class Server:
    """A running server at ``host`` and ``port``."""

    def __init__(self, process: Process, *, name: str, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._process = process
        self._name = name

    @classmethod
    async def start(cls, command: Sequence[str], *, host: str, port: int, config: bytes | None = None) -> Server:
        """Start ``command``, which writes its log to this process's stderr, and wait until it takes connections.

        config: its standard input. Raises RoleFailed where it ends, DeadlineExceeded where it does not get ready.
        """
        stdin = DEVNULL if config is None else PIPE
        bound, env = (sys.executable, "-m", "asyncflow.process", *command), {**os.environ, PARENT: str(os.getpid())}
        process = await asyncio.create_subprocess_exec(*bound, stdin=stdin, stdout=_STDERR, env=env)
        server = cls(process, name=Path(command[0]).name, host=host, port=port)
        try:
            if process.stdin is not None:
                process.stdin.write(config or b"")
                process.stdin.close()
            await server._answers()
        except BaseException:
            await server.stop()
            raise
        return server

    async def ended(self) -> None:
        """Wait until the server ends by itself, which it should not: raises RoleFailed then."""
        status = await self._process.wait()
        raise RoleFailed(f"it ended with status {status}", where=self._name, hint="Its last words are in the log")

    async def stop(self) -> None:
        """End the server."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _answers(self) -> None:
        """Wait until the server takes connections."""
        ended = asyncio.create_task(self.ended())
        try:
            async with asyncio.timeout(READY_S):
                while not ended.done():
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(self.host, self.port)
                        writer.close()
                        return
                    await asyncio.wait([ended], timeout=_AGAIN_S)
            ended.result()
        except TimeoutError:
            what = f"it took no connection at {self.host}:{self.port} for {READY_S:g} s"
            raise DeadlineExceeded(what, where=self._name) from None
        finally:
            ended.cancel()
