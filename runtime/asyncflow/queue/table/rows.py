"""Commands about rows: put, written without a lease, listed, and taken again from tasks that had them.

Rows are put in groups, under serials of their creator or of a client's own count, perhaps with keys. A write without a
lease names its writer ``WRITE...``; it is admitted whole or not at all.

Invariants: a serial makes rows once, whatever became of them, unless they are wanted; a group is made whole or not at
all; two living rows of a partition never have one key; a closed open partition gets no new row; only rows of open
partitions are written or cleared without a lease. A put under keys is refused for now while a unit of before a restart
has not yet told what it holds. What may fail comes before the first event of a command is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from asyncflow.errors import PeerLost, Refused, StaleHandle
from asyncflow.flow.schedule import VersionWindow
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import KEY_TAG, SERIAL_BITS, Purpose, Tag
from asyncflow.queue.protocol.unit_calls import Cells, NewRows
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import ANY_VERSION, IDLE, Row, RowState, Shape, SharedSizes, by_row, check, sizes_of

_Tags = Sequence[dict[str, Tag]]
_Keys = Sequence[Tag | None]
OPEN: Final = "open"
_FARTHEST = 1 << 20
"""Serials that a creator of training rows may skip: each of them is listed as missing."""


class Puts:
    """The command that makes rows."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._silent: set[int] = set()

    def start(self) -> None:
        """Wait for all units before keys can be trusted."""
        self._silent = {unit.epoch for unit in self._state.units.values()}

    def heard(self, epoch: int) -> None:
        """Note that the unit with this epoch has told all it holds, or will tell nothing any more."""
        self._silent.discard(epoch)

    def put(self, entry: NewRows) -> tuple[list[bool], Sequence[int]]:
        """Make the rows that a unit was given.

        Return whether each row is new, and the ids to tell: where it is not new, that of the row which was put so
        before or has its key already, 0 where that is gone or the row's group is not made. Raises Refused, Fenced where
        a newer attempt of the creator has begun, and ProtocolError where the cells are not those of the rows.
        """
        partition, size, samples, tags = entry.partition, entry.group_size, entry.samples, entry.tags
        rows = entry.rows
        held = self._state.partition(partition)
        groups = samples.serials if samples is not None else range(entry.group, entry.group + len(rows) // size)
        tokens = samples.tokens if samples is not None else []
        _check_shape(partition, groups, size, rows, tags, tokens)
        check(entry.cells, len(rows))
        purpose: Purpose = samples.purpose if samples is not None else OPEN
        held.check_purpose(purpose)
        step, window = 0, ANY_VERSION
        keys: list[Tag | None] = []
        if samples is None:
            keys = [of.get(KEY_TAG) for of in tags]
        else:
            held.check_creator(entry.attempt)
            step, window = samples.step, VersionWindow(samples.oldest, samples.newest)
        if any(key is not None for key in keys):
            self._check_keys(keys, partition)
        self._state.check_schema(held, entry.cells.dtypes)
        serials = _in_a_row(groups) if samples is not None else self._numbered(held, entry.client, groups)
        taken: set[Tag | None] = {key for key in keys if key in held.keys} if held.keys else set()
        most = held.used.next() + _FARTHEST if purpose == "train" else max(serials)
        new = not taken and isinstance(serials, range) and serials[-1] <= most and not held.used.overlaps(serials)
        if new:
            runs, fresh = [(0, serials[0], len(serials), window)], True
        else:
            _check_sizes(held, serials, size)
            places = [
                (number, _place(held, serial, keys[number * size : (number + 1) * size], taken, step, window))
                for number, serial in enumerate(serials)
                if serial <= most
            ]
            made = [(number, *place) for number, place in places if place is not None]
            runs, fresh = _runs(made), any(serial not in held.groups for _, serial, _ in made)
        if purpose == OPEN and fresh:
            _check_open(held)
        shape, told = held.bare.plus(tuple(entry.cells.sizes)), sizes_of(entry.cells, rows)
        for number, first, length, (oldest, newest) in runs:
            own = slice(number * size, (number + length) * size)
            row = rows[own.start]
            self._state.record(ev.RowsPut(partition, purpose, first, length, size, row, step, oldest, newest))
            self._fill(held, rows[own], shape, told, tags[own], tokens[own])
        return ([True] * len(rows), rows) if new else _answers(held, serials, size, rows, keys)

    def _numbered(self, partition: Partition, client: bytes, groups: Sequence[int]) -> Sequence[int]:
        """Return the serials of groups that a client has numbered."""
        first = (self._number(partition, client) << SERIAL_BITS) + groups[0]
        return range(first, first + len(groups))

    def _number(self, partition: Partition, client: bytes) -> int:
        """Return the client's number in the partition, which it has from now on."""
        number = partition.used.number(client)
        if number is None:
            number = partition.used.unused_number()
            self._state.record(ev.Numbered(partition.name, client, number))
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
        numbers: Sequence[int],
        shape: Shape,
        told: SharedSizes | tuple[int, ...],
        tags: _Tags,
        tokens: Sequence[int],
    ) -> None:
        """Set the columns, tags and tokens of rows that were just made, and take them into the indexes.

        Those of which no row was made are of groups that had lost other rows only.
        """
        known = self._state.rows
        fresh = [row for number in numbers if (row := known.get(number)) is not None]
        for row in fresh:
            row.shape, row.cells, row.here = shape, told, True
        first = numbers[0]
        if tags:
            for row in fresh:
                row.tags = tags[row.row - first]
            partition.name_rows(fresh)
        if tokens:
            for row in fresh:
                row.tokens = tokens[row.row - first]
        partition.created(fresh, shape)


def _check_open(partition: Partition) -> None:
    if partition.closed is not None:
        hint = "Close it after the last put; clear() of the whole partition opens it again"
        raise Refused("the partition is closed: it gets no more rows", where=partition.name, hint=hint)


def _check_shape(
    partition: str, groups: Sequence[int], size: int, rows: Sequence[int], tags: _Tags, tokens: Sequence[int]
) -> None:
    run = range(rows[0], rows[0] + len(rows)) if rows else range(0)
    if not rows or len(rows) != len(groups) * size or (rows != run and list(rows) != list(run)):
        raise Refused(f"{len(rows)} rows do not make {len(groups)} groups of {size}", where=partition)
    for what, told in (("sets of tags", tags), ("counts of tokens", tokens)):
        if told and len(told) != len(rows):
            raise Refused(f"{len(rows)} rows came with {len(told)} {what}", where=partition)
    if isinstance(groups, range):
        if groups[-1] >> SERIAL_BITS:
            hint = f"A client numbers at most {1 << SERIAL_BITS} groups; be another one for more"
            raise Refused(f"{len(groups)} groups were numbered up to {groups[-1]}", where=partition, hint=hint)
    elif min(groups) < 0 or len(set(groups)) != len(groups):
        hint = "Number each group once, from 0 on"
        raise Refused(f"{len(groups)} groups were numbered {list(groups[:8])}", where=partition, hint=hint)


def _in_a_row(serials: Sequence[int]) -> Sequence[int]:
    """Return serials, as a range where they are consecutive."""
    run = range(serials[0], serials[0] + len(serials))
    return run if list(serials) == list(run) else serials


def _check_sizes(partition: Partition, serials: Sequence[int], size: int) -> None:
    for serial in partition.groups.keys() & serials if partition.groups else ():
        if (group := partition.groups[serial]).size != size:
            what = f"the group {serial} has {group.size} rows, not {size}"
            raise Refused(what, where=partition.name, hint="Put it again as it was, or under another number")


def _place(
    partition: Partition, serial: int, keys: _Keys, taken: set[Tag | None], step: int, window: VersionWindow
) -> tuple[int, VersionWindow] | None:
    """Return the serial and window under which a group is made, None where it is not.

    These are its own, or those of a wanted row with its key.
    """
    if len(keys) == 1 and isinstance(keys[0], str):
        lost = partition.keys.get(keys[0])
        if lost is not None and lost.state is RowState.WANTED and lost.group.size == 1:
            return lost.group.serial, lost.group.window
    group = partition.groups.get(serial)
    if group is not None:
        again = group.step == step and any(row.state is RowState.WANTED for row in group.rows)
        return (serial, group.window) if again else None
    return (serial, window) if serial not in partition.used and taken.isdisjoint(keys) else None


def _runs(made: Iterable[tuple[int, int, VersionWindow]]) -> list[tuple[int, int, int, VersionWindow]]:
    """Return ascending (number, serial, window) as (first number, first serial, length, window).

    In a run the first two are consecutive and the third is the same.
    """
    runs: list[tuple[int, int, int, VersionWindow]] = []
    for number, serial, window in made:
        if runs:
            first, start, length, same = runs[-1]
            if (number, serial, window) == (first + length, start + length, same):
                runs[-1] = (first, start, length + 1, same)
                continue
        runs.append((number, serial, 1, window))
    return runs


def _answers(
    partition: Partition, serials: Sequence[int], size: int, rows: Sequence[int], keys: _Keys
) -> tuple[list[bool], list[int]]:
    ok: list[bool] = []
    told: list[int] = []
    for index, number in enumerate(rows):
        group = partition.groups.get(serials[index // size])
        row = group.rows[index % size] if group is not None else None
        key = keys[index] if keys else None
        if row is None and isinstance(key, str):
            row = partition.keys.get(key)
        ok.append(row is not None and row.row == number)
        told.append(row.row if row is not None and row.state is RowState.LIVE else 0)
    return ok, told


def write(state: QueueState, numbers: Sequence[int], cells: Cells, tags: Sequence[dict[str, Tag]]) -> list[bool]:
    """Admit columns and tags of rows of one open partition, to all of them or none.

    Raises StaleHandle for a row that is not there, Refused for columns that do not fit or rows that need a lease.
    """
    rows = live_rows(state, numbers)
    if not rows:
        return []
    partition = _written(state, rows, tags)
    state.check_schema(partition, cells.dtypes)
    names, sizes = by_row(cells, len(rows))
    before = [row.shape for row in rows]
    for index, row in enumerate(rows):
        if tags and tags[index]:
            row.tags = {**row.tags, **tags[index]}
        row.present(names, sizes[index])
    partition.gained(zip(rows, before, strict=True))
    return [True] * len(rows)


def _written(state: QueueState, rows: Sequence[Row], tags: Sequence[dict[str, Tag]]) -> Partition:
    """Return the partition of rows that may be written without a lease."""
    names = {row.group.partition for row in rows}
    if len(names) > 1:
        raise Refused(f"one write goes to one partition, not to {sorted(names)}", where="write")
    partition = state.partition(names.pop())
    if partition.purpose != OPEN:
        hint = "Claim them, and complete them with their columns"
        raise Refused("rows of a training run are written under a lease only", where=partition.name, hint=hint)
    if any(KEY_TAG in changed for changed in tags):
        hint = "Put the row under the other key, and clear this one"
        raise Refused(f"the tag {KEY_TAG!r} is the row's key and stays", where=partition.name, hint=hint)
    return partition


def live_rows(state: QueueState, numbers: Iterable[int], *, of: str = "") -> list[Row]:
    """Return the rows with these ids; StaleHandle for one that is not there, or not in the partition ``of``."""
    rows = []
    for number in numbers:
        row = state.rows.get(number)
        if row is None or (of and row.group.partition != of):
            hint = "It was cleared or lost; row ids are never used again"
            raise StaleHandle(f"there is no row {number}", where=of or "queue", hint=hint)
        rows.append(row)
    return rows


def list_rows(partition: Partition) -> Iterator[Row]:
    """Yield the rows that have bytes, in the order in which they were put, whatever changes meanwhile."""
    live = RowState.LIVE
    for group in list(partition.groups.values()):
        for row in group.rows:
            if row.state is live:
                yield row


def reset(state: QueueState, partition: Partition, task: str | None) -> int:
    """Make all living rows ready again for ``task``, or every task, also those that it holds; return their number."""
    names = sorted(partition.queues) if task is None else [partition.known_task(task).spec.name]
    count = 0
    for name in names:
        queue = partition.queues[name]
        if queue.spec.kind == "gang":
            if task is None:
                continue
            hint = "A trainer begins anew, from a checkpoint (begin)"
            raise Refused("the task of a gang is not reset", where=f"{partition.name}/{name}", hint=hint)
        works = (row.work.get(name, IDLE) for row in list_rows(partition))
        if had := sum(1 for work in works if work.lease or work.done):
            state.record(ev.TaskReset(partition.name, name, had))
            count += had
    return count


def expect(state: QueueState, partition: Partition, total: int) -> None:
    """Say how many rows there will be in all; may change."""
    if partition.expected != total:
        state.record(ev.Expected(partition.name, total))
