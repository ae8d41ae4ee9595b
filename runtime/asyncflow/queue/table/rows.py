"""Commands about rows: put them, write to them without a lease, list them, and let a task have them again (``reset``).

Rows are put in groups, under serials of their creator or of a client's own count, perhaps with keys. A write without a
lease gives a name of its own in place of one (``calls.WRITE``); it is admitted whole or not at all.

Invariants: a serial makes rows once, whatever became of them, but for lost ones that are wanted again; a group is made
whole or not at all; two living rows of a partition never have one key; a closed open partition gets no new row; only
rows of open partitions are written or cleared without a lease. A put under keys is refused for now while a unit from
before a restart has not yet told what it has. What may fail comes before the first event of a command is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from asyncflow.errors import PeerLost, Refused, StaleHandle
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import KEY_TAG, SERIAL_BITS, Purpose, Samples, Tag
from asyncflow.queue.protocol.unit_calls import Cells, NewRows
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.partition import PartitionState
from asyncflow.queue.table.state import ANY_VERSION, IDLE, Row, RowState, by_row

_Keys = Sequence[Tag | None]
Change: TypeAlias = tuple[Row, Mapping[str, int], Mapping[str, Tag]]
"""A row, with the columns and the tags that it got."""
OPEN: Final = "open"
_FARTHEST = 1 << 20
"""Serials that a creator of training rows may skip: each of them is listed as missing."""


def put(state: QueueState, entry: NewRows) -> tuple[list[bool], Sequence[int]]:
    """Make the rows that a unit was given.

    Return whether each row is new, and the ids to tell: where it is not new, that of the row which was put so
    before or has its key already, 0 where that is gone or the row's group is not made. Raises Refused, Fenced where
    a newer attempt of the creator has begun, and ProtocolError where the cells are not those of the rows.
    """
    size, samples, rows = entry.group_size, entry.samples, entry.rows
    partition = state.partition(entry.partition)
    _check_form(entry)
    columns = by_row(entry.cells, len(rows))
    purpose: Purpose = samples.purpose if samples is not None else OPEN
    partition.check_purpose(purpose)
    keys: list[Tag | None] = []
    step, oldest, newest = 0, *ANY_VERSION
    if samples is None:
        keys = [of.get(KEY_TAG) for of in entry.tags]
        if any(key is not None for key in keys):
            _check_keys(state, keys, entry.partition)
    else:
        partition.check_creator(entry.attempt)
        step, oldest, newest = samples.step, samples.oldest, samples.newest
    state.check_schema(partition, entry.cells.dtypes)
    serials = samples.serials if samples is not None else _number(state, partition, entry)
    _check_sizes(partition, serials, size)
    most = partition.used.next() + _FARTHEST if purpose == "train" else max(serials)
    made = _new_groups(partition, serials, size=size, step=step, keys=keys, most=most)
    if purpose == OPEN and partition.closed is not None and any(made[at] not in partition.groups for at in made):
        hint = "Close it after the last put; clear() of the whole partition opens it again"
        raise Refused("the partition is closed: it gets no more rows", where=partition.name, hint=hint)
    if samples is not None and purpose == "train" and (left := _left_out(partition, samples, most=most)):
        state.record(ev.Skipped(entry.partition, left))
    if made:
        own = [row for at in made for row in rows[at * size : (at + 1) * size]]
        event = ev.RowsPut(entry.partition, purpose, [*made.values()], size, own, step, oldest, newest)
        state.record(event)
        fresh: list[Row] = []
        for index, number in enumerate(rows):
            if (row := state.rows.get(number)) is not None and not row.here:
                row.columns, row.here = columns[index], True
                row.tags = entry.tags[index] if entry.tags else {}
                row.tokens = samples.tokens[index] if samples is not None and samples.tokens else 0
                fresh.append(row)
        partition.name_rows(fresh)
        partition.changed(fresh, entry.cells.sizes)
        if len(fresh) == len(rows):
            return [True] * len(rows), rows
    return _answers(partition, serials, size, rows, keys)


def _left_out(partition: PartitionState, samples: Samples, *, most: int) -> list[int]:
    """Return the serials that are skipped with a put, and neither were before nor have rows."""
    return [serial for serial in samples.skipped if 0 <= serial <= most and serial not in partition.used]


def _number(state: QueueState, partition: PartitionState, entry: NewRows) -> Sequence[int]:
    """Return the serials of the groups that a client put; it has a number in the partition from now on."""
    number = partition.clients.get(entry.client)
    if number is None:
        number = len(partition.clients) + 1
        state.record(ev.Numbered(partition.name, entry.client, number))
    first = (number << SERIAL_BITS) + entry.group
    return range(first, first + len(entry.rows) // entry.group_size)


def _check_keys(state: QueueState, keys: _Keys, partition: str) -> None:
    named = [key for key in keys if key is not None]
    if not all(isinstance(key, str) and key for key in named):
        hint = "Give each row a key of at least one character, or none of them a key"
        raise Refused(f"the key of a row, its tag {KEY_TAG!r}, is no text or is empty", where=partition, hint=hint)
    if len(set(named)) < len(named):
        raise Refused("two rows of one put have the same key", where=partition)
    if state.silent:
        raise PeerLost("storage units have not yet told what they hold", where="controller", hint="Try again")


def _check_form(entry: NewRows) -> None:
    """Refuse what is no put: the numbers of rows, groups, tags and tokens do not agree."""
    partition, size, samples, count = entry.partition, entry.group_size, entry.samples, len(entry.rows)
    groups = len(samples.serials) if samples is not None else count // size
    if not count or count != groups * size:
        raise Refused(f"{count} rows do not make {groups} groups of {size}", where=partition)
    tokens = samples.tokens if samples is not None else []
    for what, told in (("sets of tags", entry.tags), ("counts of tokens", tokens)):
        if told and len(told) != count:
            raise Refused(f"{count} rows came with {len(told)} {what}", where=partition)
    if samples is None and (entry.group + groups - 1) >> SERIAL_BITS:
        hint = f"A client numbers at most {1 << SERIAL_BITS} groups; be another one for more"
        raise Refused(f"{groups} groups were numbered from {entry.group} on", where=partition, hint=hint)
    if samples is not None and (min(samples.serials) < 0 or len(set(samples.serials)) != groups):
        hint = "Number each group once, from 0 on"
        raise Refused(f"{groups} groups were numbered {samples.serials[:8]}", where=partition, hint=hint)
    if samples is not None and (both := set(samples.serials).intersection(samples.skipped)):
        raise Refused(f"the groups {sorted(both)[:8]} were put and skipped", where=partition)


def _check_sizes(partition: PartitionState, serials: Sequence[int], size: int) -> None:
    for serial in partition.groups.keys() & serials if partition.groups else ():
        if (known := len(partition.groups[serial].rows)) != size:
            what = f"the group {serial} has {known} rows, not {size}"
            raise Refused(what, where=partition.name, hint="Put it again as it was, or under another number")


def _new_groups(
    partition: PartitionState, serials: Sequence[int], *, size: int, step: int, keys: _Keys, most: int
) -> dict[int, int]:
    """Return the groups that are made, by their place in the put, with the serial of each, of at most ``most``.

    That is its own, or that of a lost row which has its key.
    """
    first, end = serials[0], serials[0] + len(serials)
    in_order = end <= most + 1 and list(serials) == list(range(first, end))
    if in_order and not any(keys) and not partition.used.overlaps(first, end):
        return dict(enumerate(serials))
    made: dict[int, int] = {}
    for place, serial in enumerate(serials):
        own = keys[place * size : (place + 1) * size]
        taken = [row for key in own if key is not None and (row := partition.keys.get(str(key))) is not None]
        group = partition.groups.get(serial)
        if size == 1 and taken and taken[0].state is RowState.WANTED and len(taken[0].group.rows) == 1:
            made[place] = taken[0].group.serial
        elif group is not None:
            if group.step == step and any(row.state is RowState.WANTED for row in group.rows):
                made[place] = serial
        elif serial <= most and serial not in partition.used and not taken:
            made[place] = serial
    return made


def _answers(
    partition: PartitionState, serials: Sequence[int], size: int, rows: Sequence[int], keys: _Keys
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
    partition, columns = _written(state, rows, tags), by_row(cells, len(rows))
    state.check_schema(partition, cells.dtypes)
    add_cells(state, zip(rows, columns, tags or [{}] * len(rows), strict=True))
    return [True] * len(rows)


def add_cells(state: QueueState, changes: Iterable[Change], *, partial: bool = False) -> None:
    """Take note of columns and tags that rows got, or that were given back unfinished."""
    changed: dict[str, list[Row]] = {}
    names: set[str] = set()
    for row, columns, tags in changes:
        if tags:
            row.tags = {**row.tags, **tags}
        row.add(columns, partial=partial)
        names.update(columns)
        changed.setdefault(row.group.partition, []).append(row)
    for partition, rows in changed.items():
        state.partition(partition).changed(rows, names)


def _written(state: QueueState, rows: Sequence[Row], tags: Sequence[dict[str, Tag]]) -> PartitionState:
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


def list_rows(partition: PartitionState) -> Iterator[Row]:
    """Yield the rows that have bytes, in the order in which they were put, whatever changes meanwhile."""
    live = RowState.LIVE
    for group in list(partition.groups.values()):
        for row in group.rows:
            if row.state is live:
                yield row


def reset(state: QueueState, partition: PartitionState, task: str | None) -> int:
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
        if had := sum(work.busy for work in works):
            state.record(ev.TaskReset(partition.name, name, had))
            count += had
    return count
