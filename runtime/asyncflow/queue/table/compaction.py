"""The durable state as the shortest list of events that makes it again.

Invariant: folding ``dump(books)`` into empty ``Books`` gives books that ``dump`` to the same list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from asyncflow.net.batches import batches
from asyncflow.queue.ledger import compacted
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.gang import Step
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import Finished, Group, State, Work

_Did: TypeAlias = Callable[[Mapping[str, Work]], list[tuple[str, int, int]]]
_CHUNK = 1000
_ALIKE = 1 << 14
"""Rows of one record, at most: who folds a snapshot serves others between two."""


def dump(books: Books) -> Iterator[ev.Event]:
    """Give the events that make the durable state of ``books``, in an order in which they can be folded."""
    units = [books.units[unit] for unit in sorted(books.units)]
    yield from units
    yield from (ev.UnitLeaving(unit.epoch, unit.unit) for unit in units if unit.epoch in books.leaving)
    yield ev.Started(books.epoch)
    for name in sorted(books.partitions):
        yield from _partition(books.partitions[name], books.index)
        yield from _again(books.partitions[name])
    yield from _moved(books)
    for lease in sorted(books.leases, key=lambda lease: lease.id):
        yield ev.Leased(lease.id, lease.partition, lease.task, lease.worker, lease.ticket, list(lease.rows))
    if completed := books.leases.completed():
        yield compacted.Acknowledged(completed)


def dump_rows(books: Books) -> Iterator[ev.Event]:
    """Give the events that make the rows of ``books``, without what their tasks have done with them."""
    for name in sorted(books.partitions):
        yield from _partition(books.partitions[name], books.index, works=False)
    yield from _moved(books)


def _moved(books: Books) -> Iterator[ev.Event]:
    """Give the rows that lie elsewhere than where they were put, by where that is."""
    homes: dict[int, list[int]] = {}
    for number, row in books.rows.items():
        if row.moved:
            homes.setdefault(row.moved, []).append(number)
    for home in sorted(homes):
        yield from (ev.Moved(home, chunk) for chunk in batches(sorted(homes[home]), _CHUNK))


def _again(partition: Partition) -> Iterator[ev.Event]:
    if partition.returned or partition.attempts:
        yield compacted.Again(partition.name, partition.returned, sorted(partition.attempts))


def _partition(partition: Partition, index: int, *, works: bool = True) -> Iterator[ev.Event]:
    name, gang = partition.name, partition.gang
    yield from (ev.Declared(partition.queues[task].spec, index) for task in sorted(partition.queues))
    yield from (partition.elsewhere[task] for task in sorted(partition.elsewhere))
    yield from (ev.Typed(name, column, dtype) for column, dtype in sorted(partition.schema.items()))
    if partition.creator:
        yield ev.TakenOver(name, partition.creator)
    resets, peeked = (partition.resets, partition.peeked) if works else (0, 0)
    if resets or peeked or partition.forgotten:
        yield compacted.Counted(name, resets, peeked, partition.forgotten)
    if partition.expected is not None:
        yield ev.Expected(name, partition.expected)
    if gang.attempt >= 0:
        yield ev.Began(name, gang.attempt, gang.theta, gang.world)
    if gang.committed:
        yield ev.Committed(name, gang.committed)
    if partition.purpose == "open":
        yield from _open_groups(partition, _works if works else _none)
    elif partition.purpose is not None:
        for k, oldest, newest, runs in _finished(partition):
            yield compacted.Ended(name, partition.purpose, k, oldest, newest, runs)
        did = _works if works else _none
        yield from (_group(partition.groups[serial], did) for serial in sorted(partition.groups))
    for number in sorted(gang.steps):
        step = gang.steps[number]
        if step.groups is not None:
            yield ev.Opened(name, number, step.groups, step.size or 0)
        yield from _slots(name, step)
        yield from (ev.RankDone(name, number, rank) for rank in sorted(step.ranks_done))
    if partition.closed is not None:
        yield ev.Closed(name, partition.closed)


def _finished(partition: Partition) -> Iterator[tuple[int, int, int, list[tuple[int, int, str]]]]:
    """Give the finished groups as runs of consecutive serials and equal outcomes, by step and window."""
    steps: dict[tuple[int, int, int], list[tuple[int, int, str]]] = {}
    before: tuple[int, Finished] | None = None
    for serial, finished in partition.finished.items():
        runs = steps.setdefault((finished.step, *finished.window), [])
        if before == (serial - 1, finished):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, finished.outcome)
        else:
            runs.append((serial, 1, finished.outcome))
        before = (serial, finished)
    for (step, oldest, newest), runs in sorted(steps.items()):
        yield from ((step, oldest, newest, chunk) for chunk in batches(runs, _CHUNK))


def _open_groups(partition: Partition, did: _Did) -> Iterator[ev.Event]:
    """Give the groups in the order in which they came, those that are alike together."""
    run: compacted.Alike | None = None
    inside: Counter[State] = Counter()
    known: dict[int, tuple[Mapping[str, Work], list[tuple[str, int, int]]]] = {}
    for group in partition.groups.values():
        first = group.rows[0]
        if id(first.work) not in known:
            known[id(first.work)] = (first.work, did(first.work))
        works = known[id(first.work)][1]
        if run is not None and _follows(run, group, works, did):
            run = compacted.Alike(run.partition, run.serial, run.groups + 1, run.size, run.row, works)
            continue
        if run is not None:
            yield run
        run = None
        if _is_whole(group, did):
            run = compacted.Alike(partition.name, group.serial, 1, group.size, first.row, works)
        else:
            inside.update(row.state for row in group.rows)
            yield _group(group, did)
    if run is not None:
        yield run
    yield from (compacted.Clients(partition.name, chunk) for chunk in batches(partition.used.clients(), _CHUNK))
    yield from (compacted.Used(partition.name, chunk) for chunk in batches(partition.used.spans(), _CHUNK))
    filtered, dropped = (partition.counts[s] - inside[s] for s in (State.FILTERED, State.DROPPED))
    yield compacted.Used(partition.name, [], partition.cleared, filtered, dropped)


def _is_whole(group: Group, did: _Did) -> bool:
    """Tell whether all rows live, have consecutive ids, and are alike."""
    first = group.rows[0]
    return all(
        row.state is State.LIVE and row.row == first.row + index and (row.work == first.work or did is _none)
        for index, row in enumerate(group.rows)
    )


def _follows(run: compacted.Alike, group: Group, works: list[tuple[str, int, int]], did: _Did) -> bool:
    if (works is not run.works and works != run.works) or (run.groups + 1) * run.size > _ALIKE:
        return False
    after = (run.serial + run.groups, run.size, run.row + run.groups * run.size)
    return after == (group.serial, group.size, group.rows[0].row) and _is_whole(group, did)


def _works(work: Mapping[str, Work]) -> list[tuple[str, int, int]]:
    return [(task, did.attempt, did.done) for task, did in sorted(work.items())]


def _none(_work: Mapping[str, Work]) -> list[tuple[str, int, int]]:
    return []


def _slots(name: str, step: Step) -> Iterator[ev.Event]:
    bound, before = list(step.bound), 0
    for slot, decision in enumerate(step.slots):
        totals = decision.totals
        ranks = [[row.row for row in rank] for rank in decision.ranks]
        fresh = bound[before : totals.groups]
        before = totals.groups
        yield ev.Slotted(
            name, step.number, slot, fresh, ranks, decision.last, totals.groups, totals.samples, totals.response_tokens
        )


def _group(group: Group, did: _Did) -> ev.Event:
    rows = []
    for row in group.rows:
        state = State.LIVE if row.state is State.BOUND else row.state
        rows.append((row.sample, row.row, int(state), row.lost, did(row.work)))
    return compacted.Kept(group.partition, group.purpose, group.serial, group.size, group.step, *group.window, rows)
