"""Calls to the controllers and storage units of a queue, repeated until they are answered or their time is over.

Invariants: a connection is opened when it is first needed; calls that were begun together end together, so that
nothing goes on for a caller that has its answer, an error, or was cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import Buffer
from asyncflow.rpc.retry import retry_within
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

PARK_S = 10.0
"""Longest time that one call waits at a controller before it is made again."""
GRACE_S = 5.0
"""Time that a controller has to answer beyond the time for which a call waits there; then the call fails."""
_SHORTEST_S = 0.001


class Peer(NamedTuple):
    """A controller or a storage unit, by its role in the directory and its number there."""

    role: str
    number: int

    def __str__(self) -> str:
        if self.role == "storage":
            return f"storage unit {self.number}"
        return f"controller {self.number}" if self.number else "the controller"


CONTROLLER = Peer("controller", 0)


def now() -> float:
    """Return the time of the running event loop, in seconds that only grow."""
    return asyncio.get_running_loop().time()


def left(deadline: float) -> float:
    """Return the seconds until ``deadline``, a millisecond at least."""
    return max(_SHORTEST_S, deadline - now())


async def together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of ``jobs``, in their order. The first that fails ends the others, and its error is raised."""
    begun = list(jobs)
    if len(begun) == 1:
        return [await begun[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in begun]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class Peers:
    """The peers of one client.

    address: returns where a peer is now, None while it is nowhere; units: the indices of the units that take new rows;
    credentials: of this process, None for plain text.
    """

    def __init__(
        self,
        *,
        address: Callable[[Peer], str | None],
        units: Callable[[], Sequence[int]],
        credentials: Credentials | None = None,
    ) -> None:
        self.units = units
        self._address = address
        self._credentials = credentials
        self._connections: dict[Peer, RpcClient] = {}
        self._sent: set[asyncio.Task[None]] = set()

    async def call(
        self,
        peer: Peer,
        method: str,
        request: Struct,
        reply: type[R],
        *,
        timeout: float,
        frames: Sequence[Buffer] = (),
    ) -> tuple[R, list[memoryview]]:
        """Make one call, and return the reply and its frames; see ``RpcClient.call_frames`` for the errors."""
        if (connection := self._connections.get(peer)) is None:
            connection = self._connections[peer] = RpcClient(
                name=f"queue client of {peer}",
                resolve=partial(self._address, peer),
                credentials=self._credentials,
                expects=(peer.role,),
            )
        return await connection.call_frames(method, request, reply, timeout=timeout, frames=frames)

    async def ask(self, method: str, request: Struct, reply: type[R], *, timeout: float, peer: Peer = CONTROLLER) -> R:
        """Call a controller until it answers. Raises DeadlineExceeded when ``timeout`` seconds are over."""

        async def attempt(seconds: float) -> R:
            return (await self.call(peer, method, request, reply, timeout=seconds))[0]

        return await retry_within(attempt, what=f"{method} at {peer}", timeout=timeout)

    async def park(
        self,
        method: str,
        request: Callable[[float], Struct],
        reply: type[R],
        *,
        answers: Callable[[R], bool],
        deadline: float,
        what: str,
        peer: Peer = CONTROLLER,
    ) -> R:
        """Make the call that ``request`` returns for the seconds that it may wait, until a reply ``answers`` it.

        Return the last reply when ``deadline`` is over. Raises DeadlineExceeded where there was none ``GRACE_S`` later.
        """

        async def attempt(seconds: float) -> R:
            wait_s = min(PARK_S, max(0.0, deadline - now()))
            return (await self.call(peer, method, request(wait_s), reply, timeout=min(wait_s + GRACE_S, seconds)))[0]

        while True:
            answer = await retry_within(attempt, what=what, timeout=left(deadline + GRACE_S))
            if answers(answer) or now() >= deadline:
                return answer

    def send(self, peer: Peer, method: str, request: Struct, reply: type[Struct], *, timeout: float) -> None:
        """Begin a call for whose reply nobody waits but ``settle``."""

        async def call() -> None:
            try:
                await self.call(peer, method, request, reply, timeout=timeout)
            except AsyncFlowError as error:
                log.info("%s failed: %s", method, error)

        task = asyncio.create_task(call(), name=method)
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def settle(self) -> None:
        """Wait until the calls that were sent have ended."""
        if self._sent:
            await asyncio.wait(self._sent)

    async def close(self) -> None:
        """Close the connections."""
        await self.settle()
        for connection in self._connections.values():
            await connection.close()
