"""Messages over a Unix socket whose large parts go through an arena for each direction: as in ``net.stream``, no I/O.

A block says how large each part is. Here it may say of a large part where it lies instead: the highest bit is set,
then come the page and, in the lowest 40 bits, the bytes. Such a part is not sent, but used where it lies. A part that
finds no room there is sent as any other; nobody waits for room.

Invariants: as in ``net.stream``, but that a peer may change the bytes of a part that it has sent (see ``loans``).
"""

from __future__ import annotations

from asyncflow.net.arena.loans import Incoming
from asyncflow.net.arena.memfd import Outgoing
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox

_LIES_THERE = 1 << 63
_SIZE_BITS = 40


class ArenaInbox(Inbox):
    """What comes. arena: where large parts may lie; others: see ``Inbox``."""

    def __init__(self, arena: Incoming, *, most: int, staging: memoryview) -> None:
        self._arena = arena
        super().__init__(most=most, staging=staging)

    def _found(self, word: int) -> memoryview | None:
        if not word & _LIES_THERE:
            return None
        return self._arena.take((word ^ _LIES_THERE) >> _SIZE_BITS, word & ((1 << _SIZE_BITS) - 1))


class ArenaOutbox(Outbox):
    """What goes. arena: where large parts are put."""

    def __init__(self, arena: Outgoing) -> None:
        self._arena = arena
        super().__init__()

    def _elsewhere(self, part: memoryview) -> int | None:
        page = self._arena.put(part)
        return None if page is None else _LIES_THERE | page << _SIZE_BITS | len(part)
