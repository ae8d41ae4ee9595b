"""Commands on rows: put them, write to them without a lease, list them, and make them ready again (``reset``).

Rows are put in groups, under serials that their creator or a client counts, and optionally with keys. A write without
a lease sends its own name in place of a lease (``calls.WRITE``); it is admitted for all of its rows or for none.

Invariants: a serial makes rows once, whatever becomes of them, except that lost rows are wanted again. A group is made
whole or not at all. No two living rows of a partition have the same key. A closed open partition gets no new row. Only
rows of open partitions are written or cleared without a lease. A put with keys fails with PeerLost while a unit from
before a restart has not reported its rows. A command makes all checks that can fail before it records its first event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from asyncflow.errors import PeerLost, Refused, StaleHandle
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import KEY_TAG, SERIAL_BITS, Purpose, Tag
from asyncflow.queue.protocol.unit_calls import Cells, NewRows
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.partition import PartitionState
from asyncflow.queue.table.state import ANY_VERSION, IDLE, Row, RowState, by_row

_Keys = Sequence[Tag | None]
Change: TypeAlias = tuple[Row, Mapping[str, int], Mapping[str, Tag]]
"""A row, with the columns and the tags that were added to it."""
OPEN: Final = "open"
_FARTHEST = 1 << 20
"""Largest gap that a creator may leave in the serials of training rows; each serial in it is listed as missing."""


def put(state: QueueState, entry: NewRows) -> tuple[list[bool], Sequence[int]]:
    """Create the rows that a unit received.

    Return whether each row is new, and the ids to answer with. For a row that is not new, this is the id of the row
    that was put earlier under its number or key, or 0 if that row has ended or the group is not made. Raises Refused;
    Fenced if a newer attempt of the creator has started; ProtocolError if the cells do not match the rows.
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
    skipped = samples.skipped if samples is not None and purpose == "train" else ()
    if left_out := [serial for serial in skipped if 0 <= serial <= most and serial not in partition.used]:
        state.record(ev.Skipped(entry.partition, left_out))
    if made:
        own = [row for at in made for row in rows[at * size : (at + 1) * size]]
        state.record(ev.RowsPut(entry.partition, purpose, [*made.values()], size, own, step, oldest, newest))
        fresh: list[Row] = []
        for index, number in enumerate(rows):
            if (row := state.rows.get(number)) is not None and not row.reported:
                row.columns, row.reported = columns[index], True
                row.tags = entry.tags[index] if entry.tags else {}
                row.tokens = samples.tokens[index] if samples is not None and samples.tokens else 0
                fresh.append(row)
        partition.add_keys(fresh)
        partition.changed(fresh, entry.cells.sizes)
        if len(fresh) == len(rows):
            return [True] * len(rows), rows
    return _answers(partition, serials, size, rows, keys)


def _number(state: QueueState, partition: PartitionState, entry: NewRows) -> Sequence[int]:
    """Return the serials of the groups that a client puts, assigning the client a number if it has none."""
    number = partition.clients.get(entry.client)
    if number is None:
        number = len(partition.clients) + 1
        state.record(ev.Numbered(partition.name, entry.client, number))
    first = (number << SERIAL_BITS) + entry.group
    return range(first, first + len(entry.rows) // entry.group_size)


def _check_keys(state: QueueState, keys: _Keys, partition: str) -> None:
    named = [key for key in keys if key is not None]
    if not all(isinstance(key, str) and key for key in named):
        hint = "Pass a key of at least one character for each row, or for no row"
        raise Refused(f"the key of a row, its tag {KEY_TAG!r}, is not a text or is empty", where=partition, hint=hint)
    if len(set(named)) < len(named):
        raise Refused("two rows of one put have the same key", where=partition)
    if state.silent:
        raise PeerLost("storage units have not yet reported their rows", where="controller", hint="Try again")


def _check_form(entry: NewRows) -> None:
    """Refuse a put whose numbers of rows, groups, tags and tokens do not agree."""
    partition, size, samples, count = entry.partition, entry.group_size, entry.samples, len(entry.rows)
    groups = len(samples.serials) if samples is not None else count // size
    if not count or count != groups * size:
        raise Refused(f"{count} rows do not make {groups} groups of {size}", where=partition)
    tokens = samples.tokens if samples is not None else []
    for what, values in (("sets of tags", entry.tags), ("counts of tokens", tokens)):
        if values and len(values) != count:
            raise Refused(f"{count} rows came with {len(values)} {what}", where=partition)
    if samples is None and (entry.group + groups - 1) >> SERIAL_BITS:
        hint = f"A client numbers at most {1 << SERIAL_BITS} groups; use another client for more"
        raise Refused(f"{groups} groups were numbered from {entry.group}", where=partition, hint=hint)
    if samples is not None and (min(samples.serials) < 0 or len(set(samples.serials)) != groups):
        hint = "Number each group once, starting from 0"
        raise Refused(f"{groups} groups were numbered {samples.serials[:8]}", where=partition, hint=hint)
    if samples is not None and (both := set(samples.serials).intersection(samples.skipped)):
        raise Refused(f"the groups {sorted(both)[:8]} were put and skipped", where=partition)


def _check_sizes(partition: PartitionState, serials: Sequence[int], size: int) -> None:
    for serial in partition.groups.keys() & serials if partition.groups else ():
        if (known := len(partition.groups[serial].rows)) != size:
            what = f"the group {serial} has {known} rows, not {size}"
            raise Refused(what, where=partition.name, hint="Put it again unchanged, or under another number")


def _new_groups(
    partition: PartitionState, serials: Sequence[int], *, size: int, step: int, keys: _Keys, most: int
) -> dict[int, int]:
    """Return the groups to create: the serial of each, at most ``most``, by its position in the put.

    The serial is the group's own one or, if a lost row has the key of its row, the serial of the lost row.
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
    ids: list[int] = []
    for index, number in enumerate(rows):
        group = partition.groups.get(serials[index // size])
        row = group.rows[index % size] if group is not None else None
        key = keys[index] if keys else None
        if row is None and isinstance(key, str):
            row = partition.keys.get(key)
        ok.append(row is not None and row.row == number)
        ids.append(row.row if row is not None and row.state is RowState.LIVE else 0)
    return ok, ids


def write(state: QueueState, numbers: Sequence[int], cells: Cells, tags: Sequence[dict[str, Tag]]) -> list[bool]:
    """Admit columns and tags of rows of one open partition, for all of the rows or none.

    Raises StaleHandle for a row that does not exist, and Refused for columns that do not fit or rows that need a lease.
    """
    rows = live_rows(state, numbers)
    if not rows:
        return []
    partition, columns = _written(state, rows, tags), by_row(cells, len(rows))
    state.check_schema(partition, cells.dtypes)
    add_cells(state, zip(rows, columns, tags or [{}] * len(rows), strict=True))
    return [True] * len(rows)


def add_cells(state: QueueState, changes: Iterable[Change], *, partial: bool = False) -> None:
    """Note columns and tags that were added to rows. partial: the columns are unfinished."""
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
        raise Refused(f"the tag {KEY_TAG!r} is the row's fixed key", where=partition.name, hint=hint)
    return partition


def live_rows(state: QueueState, numbers: Iterable[int], *, of: str = "") -> list[Row]:
    """Return the rows with these ids. Raises StaleHandle for one that does not exist, or not in partition ``of``."""
    rows = []
    for number in numbers:
        row = state.rows.get(number)
        if row is None or (of and row.group.partition != of):
            hint = "It was cleared or lost; row ids are never used again"
            raise StaleHandle(f"there is no row {number}", where=of or "queue", hint=hint)
        rows.append(row)
    return rows


def list_rows(partition: PartitionState) -> Iterator[Row]:
    """Yield the live rows in the order in which they were put; rows may change during the iteration."""
    live = RowState.LIVE
    for group in list(partition.groups.values()):
        for row in group.rows:
            if row.state is live:
                yield row


def reset(state: QueueState, partition: PartitionState, task: str | None) -> int:
    """Make all living rows ready again for ``task``, or for every task, including leased ones; return their number."""
    names = sorted(partition.queues) if task is None else [partition.known_task(task).spec.name]
    count = 0
    for name in names:
        if partition.queues[name].spec.kind == "gang":
            if task is None:
                continue
            hint = "A trainer starts again from a checkpoint (begin)"
            raise Refused("the task of a gang is not reset", where=f"{partition.name}/{name}", hint=hint)
        if busy := sum(row.work.get(name, IDLE).busy for row in list_rows(partition)):
            state.record(ev.TaskReset(partition.name, name, busy))
            count += busy
    return count
