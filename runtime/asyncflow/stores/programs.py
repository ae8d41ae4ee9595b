"""Mooncake's master and a Redis server, started so that they keep what they are given until it is removed, or say no.

Invariants: nothing is evicted and nothing is written to disk; they listen on the one host that is named; a password is
given where nobody else can read it.
"""

from __future__ import annotations

from asyncflow.stores.server import Server, find_program, free_port

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
