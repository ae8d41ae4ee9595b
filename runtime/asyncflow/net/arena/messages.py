"""Messages over a Unix socket whose large parts go through an arena for each direction: as in
``net.stream``, no I/O.

A block says how large each part is. Here it may say of a large part where it lies instead: the highest bit is set,
then come the page and, in the lowest 40 bits, the bytes. Such a part is not sent, but used where it lies. A part that
finds no room there is sent as any other; nobody waits for room.

Of a part that lies in the arena of another connection two words say where: both highest bits are set, the next one
where the file is the next that came with the bytes, then come the low bits of that one's inode, else 0, the number of
the file in 8 bits and, in the lowest 32, the token; the second word has the offset and the bytes, 32 bits each (see
``lending``).

Invariants: as in ``net.stream``, but that a peer may change the bytes of a part that it has sent (see
``loans``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncflow.errors import ProtocolError
from asyncflow.net.arena.borrowing import Borrowing
from asyncflow.net.arena.lending import INODE_BITS, Lending
from asyncflow.net.arena.loans import Incoming
from asyncflow.net.arena.memfd import Outgoing
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox

_LIES_THERE = 1 << 63
_SIZE_BITS = 40
_LENT = 1 << 62
_NEW = 1 << 61
_HALF = 32
_INODE = 40
_LOW = (1 << _HALF) - 1


class ArenaInbox(Inbox):
    """What comes. arena: where large parts may lie; others: see ``Inbox``."""

    def __init__(self, arena: Incoming, *, most: int, staging: memoryview) -> None:
        self._arena = arena
        super().__init__(most=most, seal=None, staging=staging)

    def _found(self, word: int, more: Iterator[int]) -> memoryview | None:
        if not word & _LIES_THERE:
            return None
        if not word & _LENT:
            return self._arena.take((word ^ _LIES_THERE) >> _SIZE_BITS, word & ((1 << _SIZE_BITS) - 1))
        where = next(more, None)
        if where is None or not isinstance(self._arena, Borrowing):
            raise ProtocolError("a part that lies elsewhere came where none may")
        number = word >> _HALF & 0xFF
        inode = word >> _INODE & ((1 << INODE_BITS) - 1) if word & _NEW else None
        return self._arena.borrow(number, inode=inode, token=word & _LOW, offset=where >> _HALF, size=where & _LOW)


class ArenaOutbox(Outbox):
    """What goes. arena: where large parts are put."""

    def __init__(self, arena: Outgoing) -> None:
        self._arena = arena
        super().__init__(seal=None)

    def _elsewhere(self, part: memoryview) -> Sequence[int]:
        if isinstance(self._arena, Lending) and (lent := self._arena.lend(part)) is not None:
            first = _LIES_THERE | _LENT | lent.number << _HALF | lent.token
            if lent.inode is not None:
                first |= _NEW | lent.inode << _INODE
            return first, lent.offset << _HALF | len(part)
        page = self._arena.put(part)
        return () if page is None else (_LIES_THERE | page << _SIZE_BITS | len(part),)
