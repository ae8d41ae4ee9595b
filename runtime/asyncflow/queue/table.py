"""The queue as a pure state machine: rows and units here, claims in ``Claims``, the trainer in ``Training``.

It owns no clock and no socket. Commands check, ``record`` events in the ``Books`` and leave there what is to be
written, freed and served, which the controller takes after each command.

Invariants: a sample is created once, unless it is wanted; nothing is created by an attempt that another has taken over
from, however late it comes, so what the newer one has read stays true until it creates; a cell counts as present only
after it was admitted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from asyncflow.errors import Refused
from asyncflow.identity import RowPlace
from asyncflow.queue import events as ev
from asyncflow.queue.books import Books
from asyncflow.queue.claims import Claims
from asyncflow.queue.messages import RowMeta, Tag, TaskSpec, Wanted, check_task
from asyncflow.queue.readiness import Partition
from asyncflow.queue.state import Row, State
from asyncflow.queue.training import Training

_FARTHEST = 1 << 20


class Cells(Struct, frozen=True, kw_only=True):
    """Columns of some rows, as their unit tells of them. sizes: bytes of each row; dtypes and sizes by column."""

    dtypes: dict[str, str]
    sizes: dict[str, list[int]]


class Held(Struct, frozen=True, kw_only=True):
    """A row as its unit holds it. columns, partial: bytes by column."""

    row: int
    columns: dict[str, int]
    partial: dict[str, int]
    tokens: int
    tags: dict[str, Tag]


class Table:
    """All commands of the queue. Callers pass ``now``, seconds on any steady clock. controller: its epoch."""

    def __init__(self) -> None:
        self.books = Books()
        self.claims = Claims(self.books)
        self.training = Training(self.books)
        self.controller = 0

    def start(self, now: float) -> None:
        """Begin to serve after ``books`` was folded from the ledger: a new epoch, and a full lease for every holder.

        A worker whose lease was in force when the controller stopped is so never fenced sooner than it would have been.
        """
        self.books.frees.clear()
        self.books.record(ev.Started(self.books.epoch + 1))
        self.controller = self.books.epoch
        self.claims.start(now)

    def declare(self, specs: Sequence[TaskSpec]) -> None:
        """Make tasks known; the same ones again change nothing."""
        for spec in specs:
            check_task(spec)
            partition = self.books.partition(spec.partition)
            gang = partition.gang_queue
            if spec.kind == "gang" and gang is not None and gang.spec.name != spec.name:
                hint = "The training transaction is that of one gang"
                raise Refused(f"{spec.partition} has the gang {gang.spec.name} already", where=spec.name, hint=hint)
            known = partition.queues.get(spec.name)
            if known is None or known.spec != spec:
                self.books.record(ev.Declared(spec))

    def join_unit(self, unit: int, incarnation: str) -> int:
        """Give the epoch of a unit's rows: the one it has, or a new one for a new incarnation (the old is lost)."""
        known = self.books.units.get(unit)
        if known is not None and known.incarnation == incarnation:
            return known.epoch
        self.lose_unit(unit)
        self.books.record(ev.UnitJoined(self.books.epoch + 1, unit, incarnation))
        return self.books.epoch

    def lose_unit(self, unit: int) -> None:
        """Give up what a unit held: its rows are wanted again where they were not committed."""
        if (known := self.books.units.get(unit)) is not None:
            self.books.record(ev.UnitLost(known.epoch, unit))

    def hold(self, held: Iterable[Held]) -> list[int]:
        """Take note of rows that a unit says it has; give those whose bytes it must free because nobody needs them."""
        strangers: list[int] = []
        for told in held:
            row = self.books.rows.get(told.row)
            if row is None:
                strangers.append(told.row)
                continue
            row.columns, row.partial = dict(told.columns), dict(told.partial)
            row.tokens, row.tags, row.here = told.tokens, told.tags, True
            self.books.partition(row.group.partition).refresh(row.group)
        return strangers

    def miss(self, epoch: int) -> int:
        """Give up the rows of a unit that has now told all it has and did not name them; give their number."""
        missing: dict[str, list[int]] = {}
        for row in self.books.rows.values():
            if not row.here and RowPlace.of(row.row).epoch == epoch:
                missing.setdefault(row.group.partition, []).append(row.row)
        for partition, rows in missing.items():
            self.books.record(ev.RowsLost(partition, rows))
        return sum(len(rows) for rows in missing.values())

    def take_over(self, partition: str, attempt: int) -> None:
        """Let an attempt of the partition's creator begin: older ones are fenced. Raises Fenced for an older one."""
        held = self.books.partition(partition)
        held.check_creator(attempt)
        if attempt > held.creator:
            self.books.record(ev.TakenOver(partition, attempt))

    def create(
        self, metas: Sequence[RowMeta], rows: Sequence[int], size: int, cells: Cells, *, attempt: int = 0
    ) -> list[bool]:
        """Admit new samples at ``rows``; False where a sample exists already or its group is not whole.

        attempt: of their creator; Fenced if a newer one has taken over.
        """
        admitted = [False] * len(metas)
        by_group: dict[tuple[str, int], list[int]] = {}
        for index, meta in enumerate(metas):
            by_group.setdefault((meta.partition, meta.serial), []).append(index)
        partitions = [self.books.partition(name) for name in dict.fromkeys(name for name, _ in by_group)]
        for partition in partitions:
            partition.check_creator(attempt)
        for partition in partitions:
            self._check_schema(partition, cells.dtypes)
        for (name, serial), indices in by_group.items():
            partition = self.books.partition(name)
            self._create_group(partition, {metas[i].sample: (metas[i], rows[i]) for i in indices}, size)
            group = partition.groups.get(serial)
            for index in indices:
                row = group.rows.get(metas[index].sample) if group else None
                if row is not None and row.row == rows[index] and row.state is State.LIVE:
                    admitted[index] = True
                    row.tokens, row.tags = metas[index].tokens, dict(metas[index].tags)
                    self._present(row, cells, index)
            if group is not None:
                partition.refresh(group)
        return admitted

    def _create_group(self, partition: Partition, offered: Mapping[int, tuple[RowMeta, int]], size: int) -> None:
        first = next(iter(offered.values()))[0]
        group = partition.groups.get(first.serial)
        if group is not None:
            needed = {sample for sample, row in group.rows.items() if row.state is State.WANTED}
        elif first.serial in partition.finished or (
            first.purpose == "train" and first.serial > partition.next_serial + _FARTHEST
        ):
            needed = set()
        else:
            needed = set(range(size))
        alike = all(
            (m.step, m.min_version, m.max_version) == (first.step, first.min_version, first.max_version)
            and m.purpose == first.purpose
            for m, _ in offered.values()
        )
        fits = alike and partition.purpose in ("", first.purpose) and (group is None or group.step == first.step)
        if needed and fits and needed <= offered.keys() and (group is not None or needed == offered.keys()):
            oldest, newest = (first.min_version, first.max_version)
            cells = [(sample, offered[sample][1]) for sample in sorted(needed)]
            self.books.record(
                ev.Created(partition.name, first.purpose, first.serial, size, first.step, oldest, newest, cells)
            )

    def complete(
        self, lease: str, rows: Sequence[int], cells: Cells, tags: Sequence[dict[str, Tag]] | None
    ) -> list[bool]:
        """Admit the outputs of rows whose lease is in force, which completes them; False where it is not.

        A completion that comes again because its answer was lost is admitted again.
        """
        held = self.claims.holder(lease)
        if held is not None:
            queue = self.books.partitions[held.partition].queues[held.task]
            if missing := set(queue.spec.writes) - cells.dtypes.keys():
                raise Refused(f"task {held.task} writes {sorted(missing)} too", where=f"lease {lease}")
            self._check_schema(self.books.partitions[held.partition], cells.dtypes)
        repeated = self.claims.completed(lease, rows)
        admitted = self.claims.complete(lease, rows)
        for index in (index for index, ok in enumerate(admitted) if ok):
            row = self.books.rows[rows[index]]
            if repeated[index] and cells.sizes.keys() <= row.columns.keys():
                continue
            row.tags = row.tags | tags[index] if tags else row.tags
            self._present(row, cells, index)
        self._refresh(rows)
        return admitted

    def give_back(self, lease: str, rows: Sequence[int], reason: str, cells: Cells | None = None) -> list[bool]:
        """Let rows be ready again with attempt + 1, keeping what was written so far for the next holder."""
        returned = self.claims.give_back(lease, rows, reason)
        for index, number in enumerate(rows):
            if returned[index] and cells is not None:
                row = self.books.rows[number]
                row.partial |= {name: sizes[index] for name, sizes in cells.sizes.items() if name not in row.columns}
        return returned

    def wanted(self, partition: str) -> Wanted:
        """Give the samples to be created again. The revision changes with them and with the controller."""
        held = self.books.partition(partition)
        metas = [_bare(row) for row in sorted(held.wanted, key=lambda row: row.key)]
        return Wanted(revision=self.books.epoch << 32 | held.revision, keys=metas)

    def clear(self, partition: str, attempt: int = 0) -> None:
        """Forget all rows of a partition; its tasks stay declared. attempt: of its creator, as for ``create``."""
        held = self.books.partition(partition)
        held.check_creator(attempt)
        if held.counts.total():
            self.books.record(ev.Cleared(partition))

    def close(self, partition: str, step: int) -> None:
        """Mark the run complete: nothing of steps up to ``step`` should be unfinished."""
        if self.books.partition(partition).closed != step:
            self.books.record(ev.Closed(partition, step))

    def _check_schema(self, partition: Partition, dtypes: Mapping[str, str]) -> None:
        for name, dtype in dtypes.items():
            if (known := partition.schema.get(name, dtype)) != dtype:
                hint = "A column has one dtype in a partition"
                raise Refused(f"column {name} holds {known}, not {dtype}", where=partition.name, hint=hint)
        for name in sorted(dtypes.keys() - partition.schema.keys()):
            self.books.record(ev.Typed(partition.name, name, dtypes[name]))

    def _present(self, row: Row, cells: Cells, index: int) -> None:
        row.here = True
        row.columns |= {name: sizes[index] for name, sizes in cells.sizes.items()}
        row.partial = {name: size for name, size in row.partial.items() if name not in cells.sizes}

    def _refresh(self, numbers: Iterable[int]) -> None:
        rows = (self.books.rows.get(number) for number in numbers)
        for group in dict.fromkeys(row.group for row in rows if row is not None):
            self.books.partition(group.partition).refresh(group)


def _bare(row: Row) -> RowMeta:
    group = row.group
    return RowMeta(
        partition=group.partition,
        serial=group.serial,
        sample=row.sample,
        step=group.step,
        purpose="eval" if group.purpose == "eval" else "train",
        min_version=group.window.oldest,
        max_version=group.window.newest,
    )
