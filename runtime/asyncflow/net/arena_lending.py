"""What lies in the arena of one connection, lent to the peer of another one: nothing is copied.

The peer is given the file of that arena once, to be read only, and is told of each part where it lies there. The part
is kept, and with it its pages, until the peer gives back the *token* that it got with it: the highest free page of
the arena that goes to it, of which only the byte is used. So a token is given back as any other place.

What is still lent when the connection ends is kept for as long as anybody has the file open or mapped that the peer was
given: the kernel knows that by a lock, which belongs to the file as it was opened for this peer. It ends with the peer
and all that were forked from it, however they end.

Invariants: what is lent is not given back to its sender before whoever it was lent to gave it back, or cannot see it
any more; a peer has at most ``MOST_FILES`` files.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import threading
from typing import NamedTuple

from asyncflow.net.arena import Outgoing
from asyncflow.net.arena_loans import Mapping, address_of, owner_of

MOST_FILES = 32
_LOCK = struct.Struct("hhqqi4x")
_NUMBERS = itertools.count()


class Lent(NamedTuple):
    """Where a part lies. number: of the file; new: it is the next that goes; token: to be given back."""

    number: int
    new: bool
    token: int
    offset: int


class _Kept(NamedTuple):
    """What must not change. lock: the byte of the file of ``mapping`` that is locked for who looks at it."""

    mapping: Mapping
    part: memoryview
    lock: int

    @property
    def seen(self) -> bool:
        """Whether somebody may still look at it."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self.lock, 1, 0)
        try:
            answer = fcntl.fcntl(self.mapping.file, fcntl.F_OFD_GETLK, asked)
        except OSError:
            return True
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


_REMAINING: dict[int, _Kept] = {}
"""What is lent and whose connection has ended."""


class _Here(threading.local):
    """Those of this thread that have lent something."""

    def __init__(self) -> None:
        self.lendings: dict[Lending, None] = {}


_HERE = _Here()


class Lending(Outgoing):
    """The sender's side of an arena whose peer may be lent what lies in others. files: those that go to it next."""

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.files: list[int] = []
        self._lock = next(_NUMBERS)
        self._numbers: dict[int, int] = {}
        self._lent: dict[int, _Kept] = {}
        self._lowest = self._pages
        self._among: dict[Lending, None] = {}
        forget_gone()

    def lend(self, part: memoryview) -> Lent | None:
        """Lend a part that lies in the arena of another connection; None for what does not, or cannot be lent."""
        owner = owner_of(part)
        if not isinstance(owner, Mapping) or owner.process != os.getpid():
            return None
        memory = self._filled_to(self._first)
        if memory is None:
            return None
        self._take_back(memory, self._lowest, self._pages)
        token = self._heap.take_last()
        if token is None:
            return None
        self._lowest = min(self._lowest, token)
        number = self._numbers.get(owner.serial)
        new = number is None
        if number is None and (number := self._given(owner)) is None:
            self._heap.give_back(token)
            return None
        self._lent[token] = _Kept(owner, part, self._lock)
        self._among = _HERE.lendings
        self._among[self] = None
        return Lent(number, new, token, address_of(part) - owner.address)

    def look(self) -> None:
        """Take back what the peer needs no more."""
        if self._map is not None:
            self._take_back(self._map, self._lowest, self._pages)

    def went(self) -> None:
        """Forget the files, which went."""
        files, self.files = self.files, []
        for file in files:
            os.close(file)

    def close(self) -> None:
        """Let go of it; what is lent is kept as long as the other side may see it."""
        super().close()
        self.went()
        self._among.pop(self, None)
        lent, self._lent = self._lent, {}
        for kept in lent.values():
            _REMAINING[next(_NUMBERS)] = kept
        forget_gone()

    def _given(self, mapping: Mapping) -> int | None:
        """Have a file go to the peer; give its number, None where it cannot have it."""
        if len(self._numbers) == MOST_FILES:
            used = {kept.mapping.serial for kept in self._lent.values()}
            idle = next((serial for serial in self._numbers if serial not in used), None)
            if idle is None:
                return None
            del self._numbers[idle]
        try:
            self.files.append(_opened(mapping.file, lock=self._lock))
        except OSError:
            return None
        number = min(set(range(MOST_FILES)).difference(self._numbers.values()))
        self._numbers[mapping.serial] = number
        return number

    def _given_back(self, page: int) -> None:
        if self._lent.pop(page, None) is not None and not self._lent:
            self._among.pop(self, None)
            self._lowest = self._pages


def take_back() -> None:
    """Take back what the peers of this thread need no more of what they were lent."""
    for lending in list(_HERE.lendings):
        lending.look()
    forget_gone()


def forget_gone() -> bool:
    """Let go of what nobody looks at any more; tell whether nothing remains."""
    seen: dict[tuple[int, int], bool] = {}
    for number, kept in list(_REMAINING.items()):
        place = kept.mapping.serial, kept.lock
        if place not in seen:
            seen[place] = kept.seen
        if not seen[place]:
            _REMAINING.pop(number, None)
    return not _REMAINING


def _opened(file: int, *, lock: int) -> int:
    """Open a file anew, to read it, and lock a byte of it for as long as that is open or mapped anywhere."""
    opened = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(opened, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, lock, 1, 0))
    except BaseException:
        os.close(opened)
        raise
    return opened
