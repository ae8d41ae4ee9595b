"""New rows on their way to a storage unit that has room.

They go to the unit to which this client has put the fewest rows. Ties are broken in an order that starts at a unit
derived from the client's name, so that not all clients start with the same unit. A new unit starts with the lowest
count of the other units.

A group is identified by this client's name, 128 random bits, and the client's count of groups, or by a serial from its
creator. A put without an answer is repeated under the same numbers, at the same unit or another, and recorded once.

Invariants: all rows of a put go to one unit in one message, so all of them are recorded or none. Samples are
distributed over the units, each group whole and in one message. No two clients have the same name. The counts of two
units that are always present and accept all puts differ by at most the largest put.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from asyncflow.api.names import LEAST_BYTES
from asyncflow.errors import DeadlineExceeded, PeerLost, Refused, WrongUnit
from asyncflow.queue.peers import Peer, Peers, gather_all, pack_rows
from asyncflow.queue.protocol.messages import Samples
from asyncflow.queue.protocol.unit_calls import MOST_ROWS, PutRows, RowIds
from asyncflow.rpc.columns import Jagged, weighed_batches
from asyncflow.rpc.framing import MAX_MESSAGE
from asyncflow.rpc.retry import retry_within

LEAVING = "leaving"
"""A key in the directory's ``info`` of a unit: the unit accepts nothing new."""

_MOST_BYTES = MAX_MESSAGE - (64 << 20)
"""Bytes of the columns of one put; the rest of its message is for their offsets and for tags."""
_ALONE_S = 15.0
_ROOM_S = 2.0
_ANSWER_S = 2.0
_SLOW = 8 << 20
"""Bytes a second."""


def time_at_unit(left_s: float, *, nbytes: int, others: bool) -> tuple[float, float]:
    """Return the seconds for which a unit may wait for room, and the seconds after which its answer must arrive.

    left_s: seconds until the put's deadline; others: whether there are other units. If so, a stopped or lost unit costs
    seconds, not the whole deadline: it gets a short time to find room, another to answer, and the time to send
    ``nbytes`` on a slow link. The caller waits longer than the unit, so that a live unit itself reports a lack of room.
    """
    answer_s = min((_ROOM_S + _ANSWER_S if others else _ALONE_S) + nbytes / _SLOW, left_s)
    return min(_ROOM_S if others else _ALONE_S, 0.9 * answer_s), answer_s


class Placement:
    """The units of one client. units: returns the indices of those that accept new rows; client: the client's name."""

    def __init__(self, *, units: Callable[[], Sequence[int]], client: str) -> None:
        self._units = units
        self._rows_put: dict[int, int] = {}
        self._offset = zlib.crc32(client.encode())

    def choose(self, rows: int, *, but: Collection[int] = ()) -> int:
        """Return the unit for ``rows`` rows and count them; return one of ``but`` only if there is no other.

        Raises PeerLost if no unit accepts rows.
        """
        units = sorted(self._units())
        if not units:
            raise PeerLost("no storage unit accepts rows", where="queue client")
        if self._rows_put.keys() != set(units):
            least = min((self._rows_put[unit] for unit in units if unit in self._rows_put), default=0)
            self._rows_put = {unit: self._rows_put.get(unit, least) for unit in units}
        first = self._offset % len(units)
        in_turn = [*units[first:], *units[:first]]
        unit = min([unit for unit in in_turn if unit not in but] or in_turn, key=self._rows_put.__getitem__)
        self._rows_put[unit] += rows
        return unit


class Putter:
    """Puts rows for one client. worker: the client's name."""

    def __init__(self, peers: Peers, *, worker: str) -> None:
        self._peers = peers
        self._placement = Placement(units=peers.units, client=worker)
        self._name = secrets.token_bytes(16)
        self._groups = 0

    async def put(self, request: PutRows, columns: Mapping[str, Jagged], *, timeout: float) -> RowIds:
        """Put ``columns``. request: values that all messages of this put share, with number and tags of all rows.

        Samples are split into parts. Together with the later columns of its rows, a part is never larger than any unit
        can hold, unless it is one group. A part that finds no room at its unit goes to the next one, so a put fails for
        lack of room only if all units together have none, which ``RLJobSpec.bytes_of_interval`` rules out.
        """
        rows, size, samples = request.header.rows, request.group_size, request.samples
        if not rows or rows % size:
            raise Refused(f"{rows} rows make no groups of {size}", where="queue client", hint="Put whole groups")
        if samples is None:
            nbytes = sum([column.nbytes for column in columns.values()])
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
        result = RowIds([0] * rows, [True] * rows)
        waiting = dict.fromkeys(range(len(parts)))
        tried: dict[int, str] = {}

        async def send(unit: int, some: Sequence[int], seconds: float) -> None:
            indices = parts[some[0]] if len(some) == 1 else list(chain.from_iterable(parts[part] for part in some))
            header, frames = pack_rows(columns, indices, rows=rows)
            nbytes = sum(map(len, frames))
            room_s, answer_s = time_at_unit(seconds, nbytes=nbytes, others=len(self._peers.units()) > 1)
            part = replace(
                request,
                client=self._name,
                group=number,
                header=header,
                tags=[request.tags[index] for index in indices] if request.tags else [],
                wait_s=room_s,
                samples=_select(samples, some, indices) if samples is not None else None,
            )
            peer = Peer("storage", unit)
            try:
                put, _ = await self._peers.call(peer, "unit.put", part, RowIds, timeout=answer_s, frames=frames)
            except (WrongUnit, PeerLost, DeadlineExceeded) as error:
                tried[unit] = str(error)
                if isinstance(error, WrongUnit):
                    return
                raise
            for place, (index, row) in enumerate(zip(indices, put.rows, strict=True)):
                result.rows[index] = row
                result.new[index] = put.new[place] if put.new else True
            for of_put in some:
                del waiting[of_put]

        async def attempt(seconds: float) -> None:
            by_unit: dict[int, list[int]] = {}
            for part in waiting:
                by_unit.setdefault(self._placement.choose(len(parts[part]), but=tried), []).append(part)
            await gather_all(
                send(unit, some, seconds)
                for unit, placed in by_unit.items()
                for some in weighed_batches(placed, weights.__getitem__, heaviest=LEAST_BYTES)
            )
            if waiting:
                raise PeerLost(f"rows go to another unit: {'; '.join(tried.values())}", where="queue client")

        await retry_within(attempt, what=f"putting {rows} rows", timeout=timeout)
        return result


def _check_samples(samples: Samples, groups: int, rows: int) -> None:
    """Refuse samples that do not match the numbers of rows and groups."""
    serials = samples.serials
    if len(serials) != groups or len(set(serials)) != groups or len(samples.tokens) not in (0, rows):
        what = f"{rows} rows in {groups} groups came with {len(set(serials))} serials, {len(samples.tokens)} tokens"
        raise Refused(what, where="queue client", hint="Name each group once, and the tokens of all rows or none")


def _weights(columns: Mapping[str, Jagged], parts: Sequence[range], outputs: Mapping[str, int]) -> list[int]:
    """Return the bytes of each part of the rows, including the columns that it gets later."""
    outputs_size, sizes = sum(outputs.values()), [column.sizes for column in columns.values()]
    return [outputs_size * len(part) + sum([sum(of[part.start : part.stop]) for of in sizes]) for part in parts]


def _select(samples: Samples, groups: Sequence[int], rows: Sequence[int]) -> Samples:
    """Return the samples of some groups, which have these rows."""
    tokens = [samples.tokens[row] for row in rows] if samples.tokens else []
    return replace(samples, serials=[samples.serials[group] for group in groups], tokens=tokens)
