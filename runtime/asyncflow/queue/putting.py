"""New rows on their way to a storage unit that has room.

They go to the unit that this client gave the fewest rows, of equal ones to the first from the place on that its name
says, so that many clients do not all begin with the same. A unit that is new counts as given as many as the least of
the others.

A group is known by this client's name, 128 random bits, and its own count, or by the serial that its creator gave it.
What got no answer is put again under the same numbers, at the same unit or another, and recorded once.

Invariants: all rows of a put go to one unit in one message, so they are recorded all at once or not at all; samples are
spread over the units, each group whole and in one message; no two clients have the same name; the counts of two units
that are there all the time, and take what comes, differ by no more than the largest put.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from asyncflow.api.names import LEAST_BYTES
from asyncflow.errors import DeadlineExceeded, Elsewhere, PeerLost, Refused
from asyncflow.queue.peers import Peer, Peers, encoded, together
from asyncflow.queue.protocol.messages import Samples
from asyncflow.queue.protocol.unit_calls import MOST_ROWS, PutRows, RowIds
from asyncflow.rpc.columns import Jagged, weighed_batches
from asyncflow.rpc.framing import MAX_MESSAGE
from asyncflow.rpc.retry import retry_within

LEAVING = "leaving"
"""In the directory's ``info`` of a unit: it takes nothing new."""

_MOST_BYTES = MAX_MESSAGE - (64 << 20)
"""Bytes of the columns of one put; the rest of its message is for their offsets and for tags."""
_ALONE_S = 15.0
_ROOM_S = 2.0
_ANSWER_S = 2.0
_SLOW = 8 << 20
"""Bytes a second."""


def time_at_unit(left_s: float, *, nbytes: int, others: bool) -> tuple[float, float]:
    """Return for how many seconds a unit may wait for room, and after how many its answer must be here.

    left_s: until the put's deadline; others: whether there are other units. Then a unit that is stopped or gone costs
    seconds, not the whole deadline: it has a moment to find room, another to answer, and the time that ``nbytes`` need
    on a slow link. The caller waits longer than the unit, so a unit that is there says itself that it found no room.
    """
    answer_s = min((_ROOM_S + _ANSWER_S if others else _ALONE_S) + nbytes / _SLOW, left_s)
    return min(_ROOM_S if others else _ALONE_S, 0.9 * answer_s), answer_s


class Placement:
    """The units of one client. units: returns the indices of those that take new rows; client: its name."""

    def __init__(self, *, units: Callable[[], Sequence[int]], client: str) -> None:
        self._units = units
        self._given: dict[int, int] = {}
        self._first = zlib.crc32(client.encode())

    def choose(self, rows: int, *, but: Collection[int] = ()) -> int:
        """Return the unit for ``rows`` rows, which count as given; one of ``but`` only if there is no other.

        Raises PeerLost where no unit takes rows.
        """
        units = sorted(self._units())
        if not units:
            raise PeerLost("no storage unit is there that takes rows", where="queue client")
        if self._given.keys() != set(units):
            least = min((self._given[unit] for unit in units if unit in self._given), default=0)
            self._given = {unit: self._given.get(unit, least) for unit in units}
        first = self._first % len(units)
        in_turn = [*units[first:], *units[:first]]
        unit = min([unit for unit in in_turn if unit not in but] or in_turn, key=self._given.__getitem__)
        self._given[unit] += rows
        return unit


class Putter:
    """Puts rows for one client. worker: its name."""

    def __init__(self, peers: Peers, *, worker: str) -> None:
        self._peers = peers
        self._placement = Placement(units=peers.units, client=worker)
        self._name = secrets.token_bytes(16)
        self._groups = 0

    async def put(self, request: PutRows, columns: Mapping[str, Jagged], *, timeout: float) -> RowIds:
        """Put ``columns``. request: what the messages of this put have in common, with number and tags of all rows.

        Samples are cut into parts, of which none weighs more, with what its rows get later, than any unit can hold,
        unless it is one group. A part that finds no room at its unit goes to the next, so a put fails for want of room
        only where all units together have none, which ``RLJobSpec.bytes_of_interval`` rules out.
        """
        rows, size, samples = request.header.rows, request.group_size, request.samples
        if not rows or rows % size:
            raise Refused(f"{rows} rows make no groups of {size}", where="queue client", hint="Give whole groups")
        if samples is None:
            nbytes = sum(column.nbytes for column in columns.values())
            if nbytes > _MOST_BYTES or rows > MOST_ROWS:
                most = f"{MOST_ROWS} rows and {_MOST_BYTES} bytes"
                what = f"{rows} rows of {nbytes} bytes are more than one put takes: {most}"
                raise Refused(what, where=request.partition, hint="Put fewer rows at a time")
            number, self._groups = self._groups, self._groups + rows // size
            parts, weights = [range(rows)], [0]
        else:
            _check_samples(samples, rows // size, rows)
            parts = [range(first, first + size) for first in range(0, rows, size)]
            number, weights = 0, _weights(columns, parts, request.outputs)
        made = RowIds([0] * rows, [True] * rows)
        waiting = dict.fromkeys(range(len(parts)))
        tried: dict[int, str] = {}

        async def send(unit: int, some: Sequence[int], seconds: float) -> None:
            indices = parts[some[0]] if len(some) == 1 else list(chain.from_iterable(parts[part] for part in some))
            header, frames = encoded(columns, indices, rows=rows)
            nbytes = sum(memoryview(frame).nbytes for frame in frames)
            room_s, answer_s = time_at_unit(seconds, nbytes=nbytes, others=len(self._peers.units()) > 1)
            part = replace(
                request,
                client=self._name,
                group=number,
                header=header,
                tags=[request.tags[index] for index in indices] if request.tags else [],
                wait_s=room_s,
                samples=_chosen(samples, some, indices) if samples is not None else None,
            )
            peer = Peer("storage", unit)
            try:
                put, _ = await self._peers.call(peer, "unit.put", part, RowIds, timeout=answer_s, frames=frames)
            except (Elsewhere, PeerLost, DeadlineExceeded) as error:
                tried[unit] = str(error)
                if isinstance(error, Elsewhere):
                    return
                raise
            for place, (index, row) in enumerate(zip(indices, put.rows, strict=True)):
                made.rows[index] = row
                made.new[index] = put.new[place] if put.new else True
            for of_put in some:
                del waiting[of_put]

        async def attempt(seconds: float) -> None:
            by_unit: dict[int, list[int]] = {}
            for part in waiting:
                by_unit.setdefault(self._placement.choose(len(parts[part]), but=tried), []).append(part)
            await together(
                send(unit, some, seconds)
                for unit, placed in by_unit.items()
                for some in weighed_batches(placed, weights.__getitem__, heaviest=LEAST_BYTES)
            )
            if waiting:
                raise PeerLost(f"rows go to another unit: {'; '.join(tried.values())}", where="queue client")

        await retry_within(attempt, what=f"putting {rows} rows", timeout=timeout)
        return made


def _check_samples(samples: Samples, groups: int, rows: int) -> None:
    """Refuse samples of which there are others than rows."""
    serials = samples.serials
    if len(serials) != groups or len(set(serials)) != groups or len(samples.tokens) not in (0, rows):
        what = f"{rows} rows in {groups} groups came with {len(set(serials))} serials, {len(samples.tokens)} tokens"
        raise Refused(what, where="queue client", hint="Name each group once, and the tokens of all rows or none")


def _weights(columns: Mapping[str, Jagged], parts: Sequence[range], outputs: Mapping[str, int]) -> list[int]:
    """Return the bytes of each part of the rows, with those of the columns that it gets later."""
    later, sizes = sum(outputs.values()), [column.sizes for column in columns.values()]
    return [later * len(part) + sum([sum(of[part.start : part.stop]) for of in sizes]) for part in parts]


def _chosen(samples: Samples, groups: Sequence[int], rows: Sequence[int]) -> Samples:
    """Return those of some groups, which have these rows."""
    tokens = [samples.tokens[row] for row in rows] if samples.tokens else []
    return replace(samples, serials=[samples.serials[group] for group in groups], tokens=tokens)
