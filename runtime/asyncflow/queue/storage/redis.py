"""Cells in a Redis server: the unit's holder, or a server that others operate.

Invariants: the keys of a unit begin with its owner, index and incarnation, and a unit first removes the values of its
earlier incarnations. It uses no server that might drop a value by itself (``maxmemory`` without ``noeviction``). Of the
job's own servers it uses only those that require the job's password, if there is one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from asyncflow.errors import ManifestError
from asyncflow.queue.storage.backend import Outcome, Site, Store, answer_of, split
from asyncflow.queue.storage.packed import PackedBackend
from asyncflow.queue.storage.servers import find_program
from asyncflow.rpc.columns import Array, batches

log = logging.getLogger(__name__)

T = TypeVar("T")
_WHERE = "spec.transferQueue.backend"
_ANSWER_S = 10.0
_REACH_S = 2.0
_CONNECTIONS = 8


class RedisBackend(PackedBackend):
    """Samples as values in Redis."""

    @classmethod
    def check(cls, *, servers: bool) -> None:
        """Raise ManifestError if the client library, or with ``servers`` the server, is not installed."""
        if servers:
            find_program("redis-server")
        _library()

    @classmethod
    def create(cls, site: Site) -> Self:
        """Return a backend that finds its server by the role ``holder``, at the unit's index."""
        find = functools.partial(site.find, "holder", site.unit)
        store = RedisStore(find, unit=site.unit_prefix, password=site.password)
        return cls(store, prefix=site.prefix, lasting=site.lasting)


class RedisStore(Store):
    """A client of the server whose address ``find`` returns; the address may change after a restart.

    unit: the prefix of all keys of this unit, whatever its incarnation.
    """

    def __init__(self, find: Callable[[], str | None], *, unit: str, password: str = "") -> None:
        self._redis = _library()
        self._find = find
        self._unit = unit
        self._password = password
        self._address = ""
        self._client: Any = None

    async def open(self) -> None:
        """Wait for the server, check its memory policy, and remove the values of earlier incarnations."""
        config = await answer_of(lambda: self._call(lambda client: client.config_get("maxmemory*")))
        limit, policy = int(config.get("maxmemory", 0)), config.get("maxmemory-policy")
        if not limit or policy != "noeviction":
            hint = "Set maxmemory, and maxmemory-policy noeviction"
            raise ManifestError(f"Redis has maxmemory {limit} and policy {policy}", where=_WHERE, hint=hint)
        await answer_of(lambda: self._call(self._sweep))

    async def write(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """SET each value."""
        commands = [("SET", key, value.data) for key, value in zip(keys, split(values, sizes), strict=True)]
        answers = await self._call_each(commands)
        full = self._redis.exceptions.OutOfMemoryError
        return [
            Outcome.DONE if answer is True else Outcome.FULL if isinstance(answer, full) else Outcome.FAILED
            for answer in answers
        ] or [Outcome.AWAY] * len(keys)

    async def read(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """MGET all values."""
        found = await self._call(lambda client: client.mget(keys))
        if found is None:
            return [Outcome.AWAY] * len(keys)
        outcomes = [Outcome.LOST] * len(keys)
        for number, (place, value) in enumerate(zip(split(values, sizes), found, strict=True)):
            if value is not None and len(value) == len(place):
                place.data[:] = value
                outcomes[number] = Outcome.DONE
        return outcomes

    async def find_lost(self, unmoved: Sequence[str], others: Sequence[str]) -> list[str]:  # noqa: ARG002
        """Query which keys exist; a restarted server has none of them."""
        missing: list[str] = []
        for part in batches(others, self.most_keys):
            found = await self._call_each([("EXISTS", key) for key in part])
            missing += [key for key, exists in zip(part, found, strict=False) if not exists]
        return missing

    async def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """UNLINK all values."""
        removed = await self._call(lambda client: client.unlink(*keys))
        return [Outcome.AWAY if removed is None else Outcome.DONE] * len(keys)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _sweep(self, client: Any) -> int:
        stale = [key async for key in client.scan_iter(match=f"{self._unit}*", count=self.most_keys)]
        for part in batches(stale, self.most_keys):
            await client.unlink(*part)
        return len(stale)

    async def _call_each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the server's answer to each command, which may be an exception; nothing if it does not answer."""

        async def send(client: Any) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute(raise_on_error=False))

        return await self._call(send) or []

    async def _call(self, call: Callable[[Any], Awaitable[T]]) -> T | None:
        """Return the server's answer, None if it does not answer. Raises ManifestError if it refuses this client."""
        errors = self._redis.exceptions
        try:
            client = await self._connected()
            return None if client is None else await call(client)
        except (errors.AuthenticationError, errors.NoPermissionError) as refused:
            raise ManifestError(f"Redis refuses this job: {refused}", where=_WHERE) from refused
        except (errors.RedisError, OSError) as error:
            log.info("Redis is unreachable: %s", error)
            return None

    async def _connected(self) -> Any:
        address = self._find()
        if address is not None and address != self._address:
            await self.close()
            place = urlsplit(address)
            self._address = address
            self._client = self._redis.asyncio.Redis(
                host=place.hostname,
                port=place.port,
                password=self._password or None,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_REACH_S,
                max_connections=_CONNECTIONS,
                retry=self._redis.asyncio.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            )
        return self._client


def _library() -> Any:
    try:
        import redis
        import redis.asyncio.retry
        import redis.backoff
    except ImportError as error:
        hint = "Run pip install 'asyncflow[redis]'"
        raise ManifestError(f"the Redis client cannot be loaded: {error}", where=_WHERE, hint=hint) from error
    return redis
