"""What has come through shared memory and is used where it lies, until nobody looks at it any more.

A part is a view of the sender's pages, a *loan*; when the last view of it is gone, in whichever thread, the pages go
back. At most half of an arena is lent: what comes then is copied out, so its sender finds room again. Memory is mapped
as long as a loan lasts, also after the connection and the sender have ended; of an arena whose connection has ended
only the pages that are lent are kept, and the bytes that it begins with.

The sender could still change what it has sent, as it could change any memory of this process: both run as the same user
on one host. So could a process that was forked from this one: it shares what had come before.

Invariant: a part lies within the arena and begins where no other does that is still lent, else ProtocolError.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from asyncflow.errors import ProtocolError
from asyncflow.net.arena.memfd import FREE, PAGE, pages_of


class _Mapping(mmap.mmap):
    """The memory of an arena, which the views of loans keep alive, and with it what must be known when they end.

    loans: by first page; ended: bytes of those that have ended, for ``Incoming`` to count; process: the one that
    received, since those that were forked from it give nothing back.
    """

    def __init__(self, *_: int) -> None:
        self.loans: dict[int, _Loan] = {}
        self.ended: deque[int] = deque()
        self.closed_stream = False
        self.process = os.getpid()

    def discard(self, begin: int, end: int) -> None:
        """Return pages to the kernel."""
        if begin < end and self.process == os.getpid():
            with contextlib.suppress(OSError):
                self.madvise(mmap.MADV_REMOVE, begin * PAGE, (end - begin) * PAGE)


class _Loan(weakref.ref[npt.NDArray[np.uint8]]):
    """Ends with the array that it refers to."""

    __slots__ = ("mapping", "page", "size")
    mapping: _Mapping
    page: int
    size: int


def _ended(loan: weakref.ref[npt.NDArray[np.uint8]]) -> None:
    """Return the pages of a loan. This may run between any two steps of any thread: it takes no lock."""
    assert isinstance(loan, _Loan)
    mapping = loan.mapping
    if mapping.process != os.getpid():
        return
    del mapping.loans[loan.page]
    if mapping.closed_stream:
        mapping.discard(loan.page, loan.page + pages_of(loan.size))
    else:
        mapping[loan.page] = FREE
        mapping.ended.append(loan.size)


class Incoming:
    """The receiver's side of an arena. file: its descriptor, which this owns."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._pages = os.fstat(file).st_size // PAGE
        self._first = pages_of(self._pages)
        self._most_lent = self._pages * PAGE // 2
        self._mapping: _Mapping | None = None
        self._lent = 0

    def take(self, page: int, size: int) -> memoryview:
        """Return a part that the sender has put there."""
        mapping = self._mapping or self._mapped()
        ended = mapping.ended
        while ended:
            self._lent -= ended.popleft()
        if not self._first <= page < page + pages_of(size) <= self._pages:
            raise ProtocolError(f"a part of {size} bytes cannot lie at page {page} of {self._pages}")
        if page in mapping.loans:
            raise ProtocolError(f"a part of {size} bytes cannot lie at page {page}, where another one does")
        there = np.frombuffer(mapping, np.uint8, size, page * PAGE)
        if self._lent + size > self._most_lent:
            copied = there.copy()
            mapping[page] = FREE
            return copied.data
        loan = _Loan(there, _ended)
        loan.mapping, loan.page, loan.size = mapping, page, size
        mapping.loans[page] = loan
        self._lent += size
        return there.data

    def close(self) -> None:
        """Take nothing any more; what is lent stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.closed_stream = True
            kept = sorted((loan.page, loan.size) for loan in list(mapping.loans.values()))
            free = self._first
            for page, size in kept:
                mapping.discard(free, page)
                free = max(free, page + pages_of(size))
            mapping.discard(free, self._pages)

    def _mapped(self) -> _Mapping:
        if self._file < 0:
            raise ProtocolError("a part came through an arena that is closed")
        made = self._mapping = _Mapping(self._file, self._pages * PAGE)
        os.close(self._file)
        self._file = -1
        return made
