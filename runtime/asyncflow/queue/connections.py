"""A client's connections: one to the controller, one to each unit, opened when first needed.

Invariant: a call is made again after the loss of a connection, and only then, until its own deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from asyncflow.errors import PeerLost
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient, persist

R = TypeVar("R", bound=Struct)


class Connections:
    """The controller and the units, by resolvers; see ``QueueClient``."""

    def __init__(
        self,
        *,
        controller: str | Callable[[], str | None],
        unit: Callable[[int], str | None],
        units: Callable[[], Sequence[int]],
        keys: Keys | None,
    ) -> None:
        self._controller = RpcClient(name="queue client", resolve=controller, keys=keys)
        self._address = unit
        self._indices = units
        self._units: dict[int, RpcClient] = {}
        self._keys = keys

    async def close(self) -> None:
        """Close all."""
        for client in (self._controller, *self._units.values()):
            await client.close()

    def homes(self, serial: int) -> list[int]:
        """Give the units that are there, the one first that takes the samples of a prompt. PeerLost for none."""
        units = sorted(self._indices())
        if not units:
            raise PeerLost("no storage unit is there", where="queue client")
        first = serial % len(units)
        return units[first:] + units[:first]

    async def ask_once(self, method: str, request: Struct, reply: type[R], *, timeout: float) -> R:
        """Call the controller."""
        return await self._controller.call(method, request, reply, timeout=timeout)

    async def ask(self, method: str, request: Struct, reply: type[R], *, timeout: float) -> R:
        """Call the controller until it answers."""
        deadline = asyncio.get_running_loop().time() + timeout
        return await persist(
            lambda: self._controller.call(method, request, reply, timeout=_left(deadline)),
            what=f"{method} at the controller",
            timeout=timeout,
        )

    async def ask_unit(
        self, unit: int, method: str, request: Struct, reply: type[R], *, timeout: float, frames: Sequence[Buffer] = ()
    ) -> tuple[R, list[memoryview]]:
        """Call a unit until it answers."""
        deadline = asyncio.get_running_loop().time() + timeout
        client = self._unit(unit)
        return await persist(
            lambda: client.call_frames(method, request, reply, timeout=_left(deadline), frames=frames),
            what=f"{method} at storage unit {unit}",
            timeout=timeout,
        )

    async def ask_unit_once(
        self, unit: int, method: str, request: Struct, reply: type[R], *, timeout: float, frames: Sequence[Buffer] = ()
    ) -> R:
        """Call a unit."""
        return await self._unit(unit).call(method, request, reply, timeout=timeout, frames=frames)

    def _unit(self, index: int) -> RpcClient:
        if index not in self._units:
            name = f"queue client of unit {index}"
            self._units[index] = RpcClient(name=name, resolve=lambda: self._address(index), keys=self._keys)
        return self._units[index]


def _left(deadline: float) -> float:
    return max(0.001, deadline - asyncio.get_running_loop().time())
