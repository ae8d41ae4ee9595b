"""Commands about open rows: written, listed, looked at, taken again and cleared by whoever has their ids.

The sender of ``PutRows`` creates them; claims and leases treat them as any others. A write without a lease names its
writer ``WRITE...``; it is admitted whole or not at all.

Invariants: only rows of open partitions are written or cleared without a lease; what is told here is so now; a reset
and a look are recorded, so that the audit can count what was handed out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import structs

from asyncflow.errors import Refused, StaleHandle
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import KEY_TAG, Tag
from asyncflow.queue.protocol.open_calls import Found, Listing, Progress, Sight
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.cells import by_row
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.readiness import TaskQueue
from asyncflow.queue.table.state import IDLE, Row, Shape, State

OPEN = "open"


def write(books: Books, numbers: Sequence[int], cells: Cells, tags: Sequence[dict[str, Tag]]) -> list[bool]:
    """Admit columns and tags of rows of one open partition, to all of them or none.

    Raises StaleHandle for a row that is not there, Refused for columns that do not fit or rows that need a lease.
    """
    rows = live_rows(books, numbers)
    if not rows:
        return []
    partition = _written(books, rows, tags)
    books.check_schema(partition, cells.dtypes)
    names, sizes = by_row(cells, len(rows))
    before = [row.shape for row in rows]
    for index, row in enumerate(rows):
        if tags and tags[index]:
            row.tags = {**row.tags, **tags[index]}
        row.present(names, sizes[index])
    partition.gained(zip(rows, before, strict=True))
    return [True] * len(rows)


def _written(books: Books, rows: Sequence[Row], tags: Sequence[dict[str, Tag]]) -> Partition:
    """Return the partition of rows that may be written without a lease."""
    names = {row.group.partition for row in rows}
    if len(names) > 1:
        raise Refused(f"one write goes to one partition, not to {sorted(names)}", where="write")
    partition = books.partition(names.pop())
    if partition.purpose != OPEN:
        hint = "Claim them, and complete them with their columns"
        raise Refused("rows of a training run are written under a lease only", where=partition.name, hint=hint)
    if any(KEY_TAG in changed for changed in tags):
        hint = "Put the row under the other key, and clear this one"
        raise Refused(f"the tag {KEY_TAG!r} is the row's key and stays", where=partition.name, hint=hint)
    return partition


def live_rows(books: Books, numbers: Iterable[int], *, of: str = "") -> list[Row]:
    """Return the rows with these ids; StaleHandle for one that is not there, or not in the partition ``of``."""
    rows = []
    for number in numbers:
        row = books.rows.get(number)
        if row is None or (of and row.group.partition != of):
            hint = "It was cleared or lost; row ids are never used again"
            raise StaleHandle(f"there is no row {number}", where=of or "queue", hint=hint)
        rows.append(row)
    return rows


def list_rows(partition: Partition) -> Iterator[Row]:
    """Yield the rows that have bytes, in the order in which they were put, whatever changes meanwhile."""
    live = State.LIVE
    for group in list(partition.groups.values()):
        for row in group.rows:
            if row.state is live:
                yield row


def listing(rows: Iterable[Row]) -> Listing:
    """Describe rows in few words."""
    made = Listing([], [], [])
    for row in rows:
        made.rows.append(row.row)
        made.keys.append(key_of(row))
        made.tags.append(other_tags(row))
    return made


def find(partition: Partition, keys: Sequence[str]) -> Found:
    """Return the living rows with these keys, and those of the keys whose rows were lost with their unit."""
    rows = [partition.keys.get(key) for key in keys]
    return Found(
        rows=[row.row if row is not None and row.state is State.LIVE else 0 for row in rows],
        lost=[key for key, row in zip(keys, rows, strict=True) if row is not None and row.state is State.WANTED],
        unnamed=sum(KEY_TAG not in row.tags for row in partition.wanted),
    )


def peek(books: Books, partition: Partition, task: str, rows: Sequence[Row]) -> Sight:
    """Show rows as ``task`` sees them, and record that they were seen."""
    queue = _queue(partition, task) if task else None
    sight = Sight([], [], [], [], [], [], [], [], {})
    for index, row in enumerate(rows):
        work = row.work.get(task, IDLE)
        sight.rows.append(row.row)
        sight.keys.append(key_of(row))
        sight.tags.append(other_tags(row))
        sight.ready.append(queue is not None and _is_ready(queue, row))
        sight.leased.append(bool(work.lease))
        sight.done.append(bool(work.done))
        sight.attempts.append(work.attempt)
        sight.lacks.append(sorted(set(queue.spec.needs) - row.shape.has) if queue is not None else [])
        for name, size in row.sizes.items():
            sight.sizes.setdefault(name, [-1] * len(rows))[index] = size
    if rows:
        books.record(ev.Peeked(partition.name, len(rows)))
    return sight


def reset(books: Books, partition: Partition, task: str | None) -> int:
    """Let ``task``, or every task, have all living rows again, also those that it holds; give their number."""
    names = sorted(partition.queues) if task is None else [_queue(partition, task).spec.name]
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
            books.record(ev.Reset(partition.name, name, had))
            count += had
    return count


def expect(books: Books, partition: Partition, total: int) -> None:
    """Say how many rows there will be in all; may change."""
    if partition.expected != total:
        books.record(ev.Expected(partition.name, total))


def has_columns(columns: Sequence[str]) -> Callable[[Row], bool]:
    """Return the test whether a row has all of ``columns``."""
    needed = frozenset(columns)
    has: dict[Shape, bool] = {}

    def test(row: Row) -> bool:
        found = has.get(row.shape)
        if found is None:
            found = has[row.shape] = needed <= row.shape.has
        return found

    return test


def produced(partition: Partition, *, done: int) -> Progress:
    """Return how far a partition is when ``done`` of its rows have what was asked for."""
    return Progress(
        rows=partition.counts.total(),
        done=done,
        cleared=partition.cleared - partition.forgotten,
        expected=partition.expected,
    )


def consumed(partition: Partition, task: str) -> Progress:
    """Return how far ``task`` is."""
    queue = _queue(partition, task)
    told = produced(partition, done=queue.busy - queue.leased)
    return structs.replace(told, leased=queue.leased)


def key_of(row: Row) -> str:
    """Return the row's key, empty where it has none."""
    return str(row.tags.get(KEY_TAG, ""))


def other_tags(row: Row) -> dict[str, Tag]:
    """Return the row's tags without its key."""
    return {name: value for name, value in row.tags.items() if name != KEY_TAG}


def _is_ready(queue: TaskQueue, row: Row) -> bool:
    """Tell whether the next claim might give ``row``."""
    return queue.has_ready(row) and (row.group if queue.by_group else row) in queue.index


def _queue(partition: Partition, task: str) -> TaskQueue:
    queue = partition.task(task)
    if queue is None:
        known = ", ".join(sorted(partition.queues)) or "none"
        raise Refused(f"there is no task {task!r}", where=partition.name, hint=f"It has {known}")
    return queue
