"""What the trainer's events do to the books.

Invariant: as for all folds, see ``Books``.
"""

from __future__ import annotations

from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import StepTotals
from asyncflow.queue.table.books import Books, Fold
from asyncflow.queue.table.gang import Decision, Step
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import STATES, Group, State, new_row


def _opened(books: Books, event: ev.Opened) -> None:
    step = books.partition(event.partition).gang.step(event.step)
    step.groups, step.size = event.groups, event.size


def _began(books: Books, event: ev.Began) -> None:
    partition = books.partition(event.partition)
    gang = partition.gang
    partition.attempts.add(event.attempt)
    _commit(books, partition, event.step)
    for step in gang.steps.values():
        _unstage(partition, step)
    if gang.committed > event.step:
        _uncommit(books, partition, event.step)
    gang.attempt, gang.theta, gang.world = event.attempt, event.step, event.world
    gang.committed = event.step


def _unstage(partition: Partition, step: Step) -> None:
    for group in step.reset():
        for row in group.rows:
            if row.state is State.BOUND:
                partition.move(row, State.WANTED if row.lost else State.LIVE)
        partition.refresh(group)


def _uncommit(books: Books, partition: Partition, theta: int) -> None:
    for serial, finished in [(s, f) for s, f in partition.finished.items() if f.step > theta and "t" in f.outcome]:
        del partition.finished[serial]
        letters = finished.outcome
        assert partition.purpose is not None
        group = Group(partition.name, partition.purpose, serial, len(letters), finished.step, finished.window)
        partition.groups[serial] = group
        for sample, letter in enumerate(letters):
            state = STATES[letter]
            partition.counts[state] -= 1
            state = State.WANTED if state is State.TRAINED else state
            partition.enter(new_row(group, sample, 0, state, partition.bare, books.now))


def _slotted(books: Books, event: ev.Slotted) -> None:
    partition = books.partition(event.partition)
    step = partition.gang.step(event.step)
    begun = {serial: partition.groups[serial] for serial in event.bound}
    rows = [row for group in begun.values() for row in group.rows if row.state is State.LIVE]
    partition.bind(rows)
    step.bound.update(begun)
    step.carry.update({row.row: row for row in rows})
    ranks = [list(map(step.carry.pop, rank)) for rank in event.ranks]
    totals = StepTotals(groups=event.groups, samples=event.samples, response_tokens=event.response_tokens)
    step.slots.append(Decision(ranks, event.last, totals))


def _rank_done(books: Books, event: ev.RankDone) -> None:
    books.partition(event.partition).gang.step(event.step).ranks_done.add(event.rank)


def _committed(books: Books, event: ev.Committed) -> None:
    _commit(books, books.partition(event.partition), event.step)


def _commit(books: Books, partition: Partition, upto: int) -> None:
    gang = partition.gang
    for number in sorted(number for number in gang.steps if gang.committed < number <= upto):
        rows = [row for group in gang.steps[number].reset() for row in group.rows if row.state is State.BOUND]
        books.finish(rows, State.TRAINED)
    gang.committed = max(gang.committed, upto)


FOLDS: dict[type, Fold] = {
    ev.Opened: _opened,
    ev.Began: _began,
    ev.Slotted: _slotted,
    ev.RankDone: _rank_done,
    ev.Committed: _committed,
}
