"""What lies in the arena of one connection, lent to the peer of another one: nothing is copied.

The peer is given the file of that arena once, to be read only, and is told of each part where it lies there. The part
is kept, and with it its pages, until the peer gives back the *token* that it got with it: the highest free page of
the arena that goes to it, of which only the byte is used. So a token is given back as any other place; that is seen
when something is lent to that peer next, or by ``take_back``.

What is still lent when the connection ends is kept for as long as anybody has the file open or mapped that the peer was
given: the kernel knows that by a lock, which belongs to the file as it was opened for this peer. It ends with the peer
and all that were forked from it, however they end.

Invariants: what is lent is not given back to its sender before the process it was lent to gave it back, or neither it
nor any that was forked from it can see it any more; a peer has at most ``MOST_FILES`` files; of a peer whose connection
has ended no more remains than it can still see, each part once. A process that was forked from the peer sees what it
shares for as long as the peer gives nothing back: what is needed for longer is to be copied.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import threading
from collections import Counter
from typing import NamedTuple

from asyncflow.net.arena.loans import Mapping, address_of, loan_of, owner_of
from asyncflow.net.arena.memfd import Outgoing

MOST_FILES = 8
INODE_BITS = 16
_LOCK = struct.Struct("hhqqi4x")
_NUMBERS = itertools.count()


class Lent(NamedTuple):
    """Where a part lies. number: of the file; inode: of that, some bits, where it is the next that goes, else None;
    token: to be given back.
    """

    number: int
    inode: int | None
    token: int
    offset: int


class _Kept(NamedTuple):
    """What must not change. lock: the byte of the file of ``mapping`` that is locked for who looks at it."""

    mapping: Mapping
    part: object
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


_REMAINING: dict[tuple[int, int], list[_Kept]] = {}
"""What is lent and whose connection has ended, by file and lock."""


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
        self._used: Counter[int] = Counter()
        self._process = os.getpid()
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
        number, inode = self._numbers.get(owner.serial), None
        if number is None:
            if (given := self._given(owner)) is None:
                self._heap.give_back(token)
                return None
            number, inode = given
        self._used[owner.serial] += 1
        self._lent[token] = _Kept(owner, part, self._lock)
        self._among = _HERE.lendings
        self._among[self] = None
        return Lent(number, inode, token, address_of(part) - owner.address)

    def look(self) -> None:
        """Take back what the peer needs no more."""
        if self._map is not None and self._process == os.getpid():
            self._take_back(self._map, self._lowest, self._pages)

    def went(self) -> None:
        """Forget the files, which went."""
        files, self.files = self.files, []
        for file in files:
            os.close(file)

    def close(self) -> None:
        """Let go of it; what is lent is kept as long as the other side may see it."""
        self.look()
        super().close()
        self.went()
        self._among.pop(self, None)
        lent, self._lent = self._lent, {}
        remaining: dict[tuple[int, int], dict[int, _Kept]] = {}
        for mapping, part, lock in lent.values():
            loan = loan_of(part)
            remaining.setdefault((mapping.serial, lock), {})[id(loan)] = _Kept(mapping, loan, lock)
        _REMAINING.update({place: list(kept.values()) for place, kept in remaining.items()})
        forget_gone()

    def _given(self, mapping: Mapping) -> tuple[int, int] | None:
        """Have a file go to the peer; give its number and bits of its inode, None where it cannot have it."""
        if len(self._numbers) == MOST_FILES:
            idle = next((serial for serial in self._numbers if serial not in self._used), None)
            if idle is None:
                return None
            del self._numbers[idle]
        try:
            self.files.append(_opened(mapping.file, lock=self._lock))
        except OSError:
            return None
        number = min(set(range(MOST_FILES)).difference(self._numbers.values()))
        self._numbers[mapping.serial] = number
        return number, inode_of(self.files[-1])

    def _given_back(self, page: int) -> None:
        kept = self._lent.pop(page, None)
        if kept is not None:
            serial = kept.mapping.serial
            self._used[serial] -= 1
            if not self._used[serial]:
                del self._used[serial]
            if not self._lent:
                self._among.pop(self, None)
                self._lowest = self._pages


def take_back() -> None:
    """Take back what the peers of this thread need no more of what they were lent."""
    for lending in list(_HERE.lendings):
        lending.look()


def forget_gone() -> bool:
    """Let go of what nobody looks at any more whose connection has ended; tell whether nothing remains."""
    for place, kept in list(_REMAINING.items()):
        if not kept[0].seen:
            _REMAINING.pop(place, None)
    return not _REMAINING


def inode_of(file: int) -> int:
    """Give the low bits of the number that the kernel has for a file, by which two of them can be told apart."""
    return os.fstat(file).st_ino & ((1 << INODE_BITS) - 1)


def _opened(file: int, *, lock: int) -> int:
    """Open a file anew, to read it, and lock a byte of it for as long as that is open or mapped anywhere."""
    opened = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(opened, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, lock, 1, 0))
    except BaseException:
        os.close(opened)
        raise
    return opened
