"""Mooncake's master and a Redis server, started so that they keep each value until it is removed, or refuse it.

Invariants: nothing is evicted, and nothing is written to disk. The servers listen only on the given host. A password is
passed where no other user can read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from asyncflow.errors import DeadlineExceeded, ManifestError, RoleFailed
from asyncflow.process import PARENT

LEASE_MS = 2000
"""Milliseconds for which a value that was read cannot be removed from Mooncake, so freed bytes may return this late."""

READY_S = 30.0
_RETRY_S = 0.05
_END_S = 2.0
_STDERR = 2
_HINTS = {
    "mooncake_master": "Run pip install 'asyncflow[mooncake]'",
    "redis-server": "Install the system's package redis-server",
}


def find_program(name: str) -> str:
    """Return the path of a program of this Python's environment or of the system. Raises ManifestError."""
    local = Path(sys.executable).with_name(name)
    found = str(local) if local.exists() else shutil.which(name)
    if found is None:
        raise ManifestError(f"there is no program {name!r}", where="spec.transferQueue.backend", hint=_HINTS[name])
    return found


def free_port(host: str) -> int:
    """Return a port that is currently free on ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server at ``host`` and ``port``."""

    def __init__(self, process: Process, *, name: str, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._process = process
        self._name = name

    @classmethod
    async def start(cls, command: Sequence[str], *, host: str, port: int, config: bytes = b"") -> Server:
        """Start ``command``, which logs to this process's stderr, and wait until it accepts connections.

        config: its standard input. Raises RoleFailed if it ends, DeadlineExceeded if it does not become ready.
        """
        bound, env = (sys.executable, "-m", "asyncflow.process", *command), {**os.environ, PARENT: str(os.getpid())}
        process = await asyncio.create_subprocess_exec(*bound, stdin=PIPE, stdout=_STDERR, env=env)
        server = cls(process, name=Path(command[0]).name, host=host, port=port)
        try:
            assert process.stdin is not None
            process.stdin.write(config)
            process.stdin.close()
            async with asyncio.timeout(READY_S):
                while process.returncode is None:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(host, port)
                        writer.close()
                        return server
                    await asyncio.sleep(_RETRY_S)
            await server.ended()
        except TimeoutError:
            await server.stop()
            what = f"it accepted no connection at {host}:{port} for {READY_S:g} s"
            raise DeadlineExceeded(what, where=server._name) from None
        except BaseException:
            await server.stop()
            raise
        return server

    async def ended(self) -> None:
        """Wait until the server ends on its own, which is an error: raises RoleFailed."""
        status = await self._process.wait()
        raise RoleFailed(f"it ended with status {status}", where=self._name, hint="Its last messages are in the log")

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


async def start_mooncake_master(host: str) -> Server:
    """Start ``mooncake_master``. Raises ManifestError if it is not installed, RoleFailed if it ends at startup."""
    program = find_program("mooncake_master")
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
    """Start ``redis-server`` with ``memory`` bytes. Clients need the ``password``, unless it is "".

    Raises ManifestError if it is not installed, RoleFailed if it ends at startup.
    """
    program = find_program("redis-server")
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
