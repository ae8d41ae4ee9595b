"""What happened to the home's rows lately, for shards that follow, and snapshots for those that are too far behind.

A place in the feed is a number that counts on. Items are kept, encoded, until all shards have read them, as long as
there is room for them.

Invariants: what is between two places is all that happened to rows between them, in order; a snapshot folded into empty
books, and what came after its position, give the rows of now; memory is bounded by ``limit`` and by one list of rows
for each shard that takes a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from msgspec import Raw

from asyncflow.errors import Refused, StaleHandle
from asyncflow.net.batches import weighed_batches
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.runs import expand
from asyncflow.queue.protocol.shard_calls import AskPart, Feed, Follow, Part
from asyncflow.queue.protocol.unit_calls import Entry, Held, MovedRows
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.news import Item, Recalled, encode, gained, told_of
from asyncflow.queue.table.snapshot import snapshot_rows
from asyncflow.queue.table.state import Row

FEED = "\0feed"
"""Stands in ``Books.touched`` where a partition does: the feed has something new, or may have after the others."""

_LIMIT = 64 << 20
_MOST = 4 << 20
_ROWS = 5_000


@dataclass
class _Snapshot:
    """What a shard is being given: records, which were taken at once, and rows, whose cells are read part by part."""

    position: int
    records: list[list[bytes]]
    rows: list[int]

    @property
    def parts(self) -> int:
        return len(self.records) + -(-len(self.rows) // _ROWS)


class NewsFeed:
    """The feed of one home, for ``shards``. limit: bytes of items that are kept."""

    def __init__(self, books: Books, *, shards: Iterable[int], limit: int = _LIMIT) -> None:
        self._books = books
        self._limit = limit
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self._snapshots: dict[int, _Snapshot] = {}
        self._read = dict.fromkeys(shards, 0)
        self.home = 0
        self.position = 0

    def start(self) -> None:
        """Begin to tell, in the present epoch."""
        self.home = self._books.epoch
        self._books.news = self.happens

    def happens(self, event: ev.Event) -> None:
        """Tell of an event that is about to happen."""
        if (told := told_of(self._books, event)) is not None:
            self._add(told)

    def admitted(self, entry: Entry, ok: list[bool]) -> None:
        """Tell of the cells of an entry on which these are the verdicts."""
        if isinstance(entry, MovedRows):
            came = [number for number, here in zip(expand(entry.rows), ok, strict=False) if here]
            rows = [row for number in came if (row := self._books.rows.get(number)) is not None and row.here]
            self.recalled(map(_held, rows))
        elif any(ok):
            self._add(gained(entry, ok))

    def recalled(self, held: Iterable[Held]) -> None:
        """Tell of rows as a unit that came back holds them."""
        if here := [told for told in held if told.row in self._books.rows]:
            self._add(Recalled(here))

    def _add(self, item: Item) -> None:
        encoded = encode(item)
        self._items.append(encoded)
        self._bytes += len(encoded)
        self.position += 1
        while self._bytes > self._limit:
            self._bytes -= len(self._items.popleft())
        self._books.touched.add(FEED)

    def _note(self, shard: int, position: int) -> None:
        """Take note that a shard knows what is before ``position``; forget what all know."""
        self._read[shard] = position
        known = min(self._read.values())
        while self._items and self.position - len(self._items) < known:
            self._bytes -= len(self._items.popleft())

    def answer(self, follow: Follow) -> Feed | None:
        """Return what comes after a place, or how to take a snapshot; None where nothing came yet.

        Raises Refused for a shard that is none.
        """
        if follow.shard not in self._read:
            what = f"there is no controller {follow.shard}"
            raise Refused(what, where="controller", hint="Start as many as spec.transferQueue.controllers says")
        first = self.position - len(self._items)
        if not follow.home or follow.home != self.home or not first <= follow.position <= self.position:
            return self._begin(follow.shard)
        self._snapshots.pop(follow.shard, None)
        self._note(follow.shard, follow.position)
        first = self.position - len(self._items)
        if follow.position == self.position:
            return None
        items = list(_within(_MOST, islice(self._items, follow.position - first, None)))
        return Feed(self.home, follow.position + len(items), items)

    def _begin(self, shard: int) -> Feed:
        records = list(weighed_batches(map(encode, snapshot_rows(self._books)), len, heaviest=_MOST))
        made = _Snapshot(self.position, records, list(self._books.rows))
        self._snapshots[shard] = made
        self._note(shard, made.position)
        return Feed(self.home, made.position, [], parts=made.parts)

    def part(self, ask: AskPart) -> Part:
        """Return a part of a snapshot. StaleHandle where it is not there any more."""
        made = self._snapshots.get(ask.shard)
        if made is None or made.position != ask.position:
            raise StaleHandle("there is no such snapshot", where="controller", hint="Follow again")
        if ask.part < len(made.records):
            return Part([Raw(record) for record in made.records[ask.part]])
        start = (ask.part - len(made.records)) * _ROWS
        rows = (self._books.rows.get(number) for number in made.rows[start : start + _ROWS])
        held = [_held(row) for row in rows if row is not None and row.here]
        return Part([Raw(encode(Recalled(held)))])


def _within(most: int, items: Iterable[bytes]) -> Iterator[Raw]:
    """Yield the first items, of at most so many bytes in all, but one at least."""
    size = 0
    for item in items:
        size += len(item)
        if size > most and size > len(item):
            return
        yield Raw(item)


def _held(row: Row) -> Held:
    return Held(row=row.row, columns=row.columns, partial=dict(row.partial), tokens=row.tokens, tags=row.tags)
