"""Rows of open partitions: put by anybody, under numbers of the client's own, and perhaps under keys.

Invariants: a serial makes rows once, whatever became of them, unless they are wanted; two living rows of a partition
never have one key; a group is made whole or not at all; a closed partition gets no new row. A put under keys is put off
while a unit of before a restart has not yet told what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncflow.errors import PeerLost, Refused
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import KEY_TAG, SERIAL_BITS, Tag
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.cells import check, told_of
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import State

_Tags = Sequence[dict[str, Tag]]


class Puts:
    """The command that makes open rows."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._silent: set[int] = set()

    def start(self) -> None:
        """Wait for all units before keys can be trusted."""
        self._silent = {unit.epoch for unit in self._books.units.values()}

    def heard(self, epoch: int) -> None:
        """Note that the unit with this epoch has told all it holds, or will tell nothing any more."""
        self._silent.discard(epoch)

    def put(
        self,
        partition: str,
        *,
        client: bytes,
        group: int,
        size: int,
        rows: Sequence[int],
        cells: Cells,
        tags: _Tags,
    ) -> tuple[list[bool], Sequence[int]]:
        """Make rows in groups of ``size``, which ``client`` numbers from ``group`` on.

        rows: their ids, consecutive; tags: one set a row, or none. Gives whether each is new, and the ids to tell:
        where it is not, that of the row which was put so before or has its key already, 0 where that is gone or the
        row's group is not made. Raises Refused, and ValueError where ``cells`` are not those of the rows.
        """
        held = self._books.partition(partition)
        held.check_purpose("open")
        _check_shape(partition, group, size, rows, tags)
        check(cells, len(rows))
        keys = [set_of.get(KEY_TAG) for set_of in tags]
        if any(key is not None for key in keys):
            self._check_keys(keys, partition)
        self._books.check_schema(held, cells.dtypes)
        count, serial = len(rows) // size, self._number(held, client) << SERIAL_BITS | group
        taken: set[Tag | None] = {key for key in keys if key in held.keys} if held.keys else set()
        if not taken and not held.used.overlaps(serial, count):
            _check_open(held)
            self._books.record(ev.Put(partition, serial, count, size, rows[0]))
            self._fill(held, rows, slice(len(rows)), cells, tags)
            return [True] * len(rows), rows
        _check_sizes(held, serial, count, size)
        homes = [
            (number, home)
            for number in range(count)
            if (home := _home(held, serial + number, keys[number * size : (number + 1) * size], taken)) is not None
        ]
        if not all(home in held.groups for _, home in homes):
            _check_open(held)
        for number, first, length in _runs(homes):
            start, end = number * size, (number + length) * size
            self._books.record(ev.Put(partition, first, length, size, rows[start]))
            self._fill(held, rows, slice(start, end), cells, tags)
        return _answers(held, serial, size, rows, keys)

    def _number(self, partition: Partition, client: bytes) -> int:
        """Return the client's number in the partition, which it has from now on."""
        number = partition.used.number(client)
        if number is None:
            number = partition.used.unused_number()
            self._books.record(ev.Numbered(partition.name, client, number))
        return number

    def _check_keys(self, keys: Sequence[Tag | None], partition: str) -> None:
        named = [key for key in keys if key is not None]
        if not all(isinstance(key, str) and key for key in named):
            hint = "Give each row a key of at least one character, or none of them a key"
            raise Refused(f"the key of a row, its tag {KEY_TAG!r}, is no text or is empty", where=partition, hint=hint)
        if len(set(named)) < len(named):
            raise Refused("two rows of one put have the same key", where=partition)
        if self._silent:
            raise PeerLost("storage units have not yet told what they hold", where="controller", hint="Try again")

    def _fill(
        self,
        partition: Partition,
        rows: Sequence[int],
        made: slice,
        cells: Cells,
        tags: _Tags,
    ) -> None:
        """Set what their unit told of those of ``rows`` that were just made, and take them into the indexes.

        Those of which no row was made are of groups that had lost other rows only.
        """
        shape, told = partition.bare.plus(tuple(cells.sizes)), told_of(cells, rows)
        fresh = [row for number in rows[made] if (row := self._books.rows.get(number)) is not None]
        for row in fresh:
            row.shape, row.cells, row.here = shape, told, True
        if tags:
            for row in fresh:
                row.tags = tags[row.row - rows[0]]
            partition.name_rows(fresh)
        partition.created(fresh, shape)


def _check_open(partition: Partition) -> None:
    if partition.closed is not None:
        hint = "Close it after the last put; clear() of the whole partition opens it again"
        raise Refused("the partition is closed: it gets no more rows", where=partition.name, hint=hint)


def _check_shape(partition: str, group: int, size: int, rows: Sequence[int], tags: _Tags) -> None:
    run = range(rows[0], rows[0] + len(rows)) if rows else range(0)
    if not rows or len(rows) % size or (rows != run and list(rows) != list(run)):
        raise Refused(f"{len(rows)} rows do not make groups of {size}", where=partition)
    if tags and len(tags) != len(rows):
        raise Refused(f"{len(rows)} rows came with {len(tags)} sets of tags", where=partition)
    if (group + len(rows) // size - 1) >> SERIAL_BITS:
        hint = f"A client numbers at most {1 << SERIAL_BITS} groups; be another one for more"
        raise Refused(f"{len(rows) // size} groups were numbered from {group} on", where=partition, hint=hint)


def _check_sizes(partition: Partition, serial: int, count: int, size: int) -> None:
    for number in range(serial, serial + count):
        group = partition.groups.get(number)
        if group is not None and group.size != size:
            what = f"the group {number} has {group.size} rows, not {size}"
            raise Refused(what, where=partition.name, hint="Put it again as it was, or under another number")


def _home(partition: Partition, serial: int, keys: Sequence[Tag | None], taken: set[Tag | None]) -> int | None:
    """Return the serial under which a group is made: its own, that of a wanted row with its key, or None for none."""
    if len(keys) == 1 and isinstance(keys[0], str):
        lost = partition.keys.get(keys[0])
        if lost is not None and lost.state is State.WANTED and lost.group.size == 1:
            return lost.group.serial
    group = partition.groups.get(serial)
    if group is not None:
        return serial if any(row.state is State.WANTED for row in group.rows) else None
    return serial if serial not in partition.used and taken.isdisjoint(keys) else None


def _runs(made: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return ascending (number, serial) as (first number, first serial, length) where both are consecutive."""
    runs: list[tuple[int, int, int]] = []
    for number, serial in made:
        if runs and (number, serial) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((number, serial, 1))
    return runs


def _answers(
    partition: Partition, serial: int, size: int, rows: Sequence[int], keys: Sequence[Tag | None]
) -> tuple[list[bool], list[int]]:
    ok: list[bool] = []
    told: list[int] = []
    for index, number in enumerate(rows):
        group = partition.groups.get(serial + index // size)
        row = group.rows[index % size] if group is not None else None
        key = keys[index] if keys else None
        if row is None and isinstance(key, str):
            row = partition.keys.get(key)
        ok.append(row is not None and row.row == number)
        told.append(row.row if row is not None and row.state is State.LIVE else 0)
    return ok, told
