"""Calls to the controllers and storage units of a queue, repeated until they are answered or their deadline passes.

Rows are looked for at the units that their claim named or, without a claim, that their ids contain. If rows have moved,
the controller returns their units.

Invariants: a connection is opened when it is first needed. Calls that were started together end together, so that no
call continues after its caller has an answer or an error, or was cancelled. Each row is answered once, by its unit, or
is reported as missing. Answers come in the order of the requested rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, PeerLost, Refused, WrongUnit
from asyncflow.identity import unit_of
from asyncflow.queue.protocol.calls import NOWHERE, AskWhere
from asyncflow.queue.protocol.messages import LeasedRow, Tag
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import BatchHeader, Buffer, Jagged, encode_batch
from asyncflow.rpc.retry import retry_within
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Rows: TypeAlias = Sequence[LeasedRow | int]
"""Rows by their ids, or as their holder received them."""
Tags: TypeAlias = Sequence[Mapping[str, Tag]]
"""Tags of rows, one mapping for each row."""
Part: TypeAlias = tuple[Sequence[int], T | None]
"""The indices of rows and the result of their call; None for rows that do not exist."""

PARK_S = 10.0
"""Longest wait of one call at a controller before it is repeated."""
GRACE_S = 5.0
"""Time for a controller's answer in addition to the wait of a call; then the call fails."""
_SHORTEST_S = 0.001
_UNIT_CALL_S = 5.0
"""Time limit of a call to a unit that is unreachable or accepts nothing new, before the controller is queried again."""


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
    """Return the monotonic time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()


def left(deadline: float) -> float:
    """Return the seconds until ``deadline``, at least a millisecond."""
    return max(_SHORTEST_S, deadline - now())


async def gather_all(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of ``jobs``, in order. The first failure cancels the others, and its error is raised."""
    pending = list(jobs)
    if len(pending) == 1:
        return [await pending[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in pending]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class Peers:
    """The peers of one client.

    find: returns the address of controller or storage unit i, by its role, None if there is none yet; units: returns
    the indices of the units that accept new rows; credentials: of this process, None for plain text.
    """

    def __init__(
        self,
        *,
        find: Callable[[str, int], str | None],
        units: Callable[[], Sequence[int]],
        credentials: Credentials | None = None,
    ) -> None:
        self.units = units
        self._find = find
        self._credentials = credentials
        self._connections: dict[Peer, RpcClient] = {}
        self._sent: set[asyncio.Task[None]] = set()

    async def call(
        self, peer: Peer, method: str, request: Struct, reply: type[T], *, timeout: float, frames: Sequence[Buffer] = ()
    ) -> tuple[T, list[memoryview]]:
        """Make one call, and return the reply and its frames; see ``RpcClient.call_frames`` for the errors."""
        if (connection := self._connections.get(peer)) is None:
            connection = self._connections[peer] = RpcClient(
                name=f"queue client of {peer}",
                resolve=partial(self._find, *peer),
                credentials=self._credentials,
                expects=(peer.role,),
            )
        return await connection.call_frames(method, request, reply, timeout=timeout, frames=frames)

    async def ask(self, method: str, request: Struct, reply: type[T], *, timeout: float, peer: Peer = CONTROLLER) -> T:
        """Call a controller until it answers. Raises DeadlineExceeded when ``timeout`` seconds are over."""

        async def attempt(seconds: float) -> T:
            return (await self.call(peer, method, request, reply, timeout=seconds))[0]

        return await retry_within(attempt, what=f"{method} at {peer}", timeout=timeout)

    async def park(
        self,
        method: str,
        request: Callable[[float], Struct],
        reply: type[T],
        *,
        answers: Callable[[T], bool],
        deadline: float,
        what: str,
        peer: Peer = CONTROLLER,
    ) -> T:
        """Repeat a call, which may wait at the controller, until a reply satisfies ``answers``.

        request: builds the call for a number of seconds to wait. Return the last reply at ``deadline``. Raises
        DeadlineExceeded if there was no reply until ``GRACE_S`` later.
        """

        async def attempt(seconds: float) -> T:
            wait_s = min(PARK_S, max(0.0, deadline - now()))
            return (await self.call(peer, method, request(wait_s), reply, timeout=min(wait_s + GRACE_S, seconds)))[0]

        while True:
            answer = await retry_within(attempt, what=what, timeout=left(deadline + GRACE_S))
            if answers(answer) or now() >= deadline:
                return answer

    def send(self, peer: Peer, method: str, request: Struct, reply: type[Struct], *, timeout: float) -> None:
        """Start a call in the background; only ``settle`` waits for its reply."""

        async def call() -> None:
            try:
                await self.call(peer, method, request, reply, timeout=timeout)
            except AsyncFlowError as error:
                log.info("%s failed: %s", method, error)

        task = asyncio.create_task(call(), name=method)
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def settle(self) -> None:
        """Wait until the calls in the background have ended."""
        if self._sent:
            await asyncio.wait(self._sent)

    async def close(self) -> None:
        """Close the connections."""
        await self.settle()
        for connection in self._connections.values():
            await connection.close()


async def call_at_units(
    peers: Peers,
    rows: Sequence[int],
    units: Sequence[int],
    call: Callable[[Peer, Sequence[int], float], Coroutine[Any, Any, T]],
    *,
    apart: Sequence[Hashable] = (),
    what: str,
    timeout: float,
) -> list[Part[T]]:
    """Await ``call(unit, indices of rows, seconds)`` for the rows at each unit, and return the result of each call.

    units: last known unit of each of ``rows``; apart: a value for each row that must be the same within one call. Lost
    calls are repeated, and rows that moved are followed; other errors are raised.
    """
    deadline = now() + timeout

    async def at_all(places: Iterable[tuple[Peer, Sequence[int]]]) -> list[Part[T]]:
        found = await gather_all(
            retry_within(partial(attempt, unit, indices), what=f"{what} at {unit}", timeout=left(deadline))
            for unit, indices in places
        )
        return list(chain.from_iterable(found))

    async def attempt(unit: Peer, indices: Sequence[int], seconds: float) -> list[Part[T]]:
        if unit.number in peers.units():
            with suppress(WrongUnit):
                return [(indices, await call(unit, indices, seconds))]
        request = AskWhere([rows[index] for index in indices])
        units_now = await peers.ask("queue.where", request, list[int], timeout=left(deadline))
        places = {at: [indices[place] for place in positions] for at, positions in group_indices(units_now).items()}
        if places.keys() == {unit.number}:
            try:
                return [(indices, await call(unit, indices, min(_UNIT_CALL_S, left(deadline))))]
            except WrongUnit as moved:
                raise PeerLost(f"rows are moving: {moved}", where=str(unit)) from moved
        missing = places.pop(NOWHERE, None)
        parts = await at_all((Peer("storage", at), indices) for at, indices in places.items())
        return [*parts, (missing, None)] if missing else parts

    keys = zip(units, apart, strict=True) if apart else units
    parts = group_indices(keys).values()
    return await at_all((Peer("storage", units[indices[0]]), indices) for indices in parts)


def locate(rows: Rows) -> tuple[list[int], list[int]]:
    """Return the ids of rows, and the unit of each, as reported to its holder or contained in its id."""
    ids = [row if isinstance(row, int) else row.row for row in rows]
    return ids, [unit_of(row) if isinstance(row, int) else row.unit for row in rows]


def group_indices(keys: Iterable[K]) -> dict[K, list[int]]:
    """Return the indices of equal ``keys``, by key."""
    parts: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        parts.setdefault(key, []).append(index)
    return parts


async def scatter(keys: Iterable[K], call: Callable[[Sequence[int]], Coroutine[Any, Any, list[T]]]) -> list[T]:
    """Await ``call`` with the indices of equal ``keys``, and return the answers, one for each index, in order."""
    parts = group_indices(keys).values()
    return in_order(zip(parts, await gather_all(call(indices) for indices in parts), strict=True))


def check_rows(columns: Mapping[str, Jagged], tags: Tags | None, *, rows: int) -> None:
    """Refuse columns or tags with another number of rows."""
    if wrong := [name for name, column in columns.items() if column.lengths.size != rows]:
        hint, count = "Pass one value of each column for every row", len(columns[wrong[0]])
        raise Refused(f"column {wrong[0]} has {count} rows, not {rows}", where="queue client", hint=hint)
    sets = sum(isinstance(each, Mapping) for each in tags or ())
    if tags is not None and not sets == len(tags) == rows:
        raise Refused(f"{rows} rows came with {sets} sets of tags", where="queue client", hint="Pass one mapping a row")


def pack_rows(columns: Mapping[str, Jagged], indices: Sequence[int], *, rows: int) -> tuple[BatchHeader, list[Buffer]]:
    """Return header and frames of the rows ``indices`` of ``columns``, which have ``rows`` rows each."""
    if not columns:
        return BatchHeader(rows=len(indices), columns=[]), []
    whole = len(indices) == rows
    return encode_batch(columns if whole else {name: column.take(indices) for name, column in columns.items()})


def in_order(parts: Iterable[tuple[Sequence[int], Sequence[T]]]) -> list[T]:
    """Return answers in the order of the indices of their rows."""
    by_index: dict[int, T] = {}
    for indices, answers in parts:
        by_index.update(zip(indices, answers, strict=True))
    return [by_index[index] for index in range(len(by_index))]
