"""Memory that two processes of one host share for the large parts of what goes over one connection in one direction.

It is a file without a name (memfd), which ends with the last process that has it open or mapped: nothing can be left
behind. It begins with one byte for each of its pages. The sender knows which pages are free (``heap``), copies a part
there and says where; the receiver takes the part as it lies there (``Incoming``), and when nobody looks at it any more
sets the byte of its first page, of which the sender learns when it needs pages next.

Invariants: neither side can make the file shorter under the other, so no access to it ever fails; the sender believes
of those bytes only that places it has given out are free again, the receiver of a place only what lies in the file; a
process has no more than ``MOST_FILLED`` bytes of pages that it has begun to fill, and whoever finds none left goes
without.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np

from asyncflow.errors import ProtocolError
from asyncflow.net.arena.heap import Heap

SIZE = 256 << 20
"""Bytes of an arena."""
PAGE = mmap.PAGESIZE
FREE = 1
"""What the byte of a place's first page becomes when its part is needed no more."""
MOST_FILLED = 512 << 20
_LARGEST = 1 << 30
_NAME = "asyncflow"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Allowance:
    """Bytes that this process may still begin to fill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, count: int) -> bool:
        with self._lock:
            fits = self._taken + count <= MOST_FILLED
            self._taken += count if fits else 0
        return fits

    def give(self, count: int) -> None:
        with self._lock:
            self._taken -= count


_ALLOWANCE = _Allowance()


def made() -> int:
    """Make the file of an arena. Raises OSError where this host does not let it."""
    file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, SIZE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


def check(file: int) -> None:
    """Raise ProtocolError where a file that a peer brought is none of ``made``."""
    try:
        size = os.fstat(file).st_size
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not sealed or os.fstatvfs(file).f_bsize != PAGE:
            raise ProtocolError("a peer wants to share a file that is no arena")
    except OSError as error:
        raise ProtocolError(f"a peer wants to share a file that is no arena: {error}") from error
    if not 0 < size <= _LARGEST or size % PAGE:
        raise ProtocolError(f"a peer wants to share {size} bytes")


def pages_of(size: int) -> int:
    """Return how many pages so many bytes need."""
    return -(-size // PAGE)


class Outgoing:
    """The sender's side of an arena. file: its descriptor, which this owns."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._pages = os.fstat(file).st_size // PAGE
        self._heap = Heap(first=pages_of(self._pages), end=self._pages)
        self._map: mmap.mmap | None = None
        self._filled = 0

    def put(self, part: memoryview) -> int | None:
        """Copy a part to where the other side finds it; give the page where it begins, None where it finds no room."""
        pages = pages_of(len(part))
        if self._map is not None:
            self._take_back(self._map)
        page = self._heap.take(pages)
        if page is None:
            return None
        memory = self._filled_to(page + pages)
        if memory is None:
            self._heap.give_back(page)
            return None
        np.copyto(np.frombuffer(memory, np.uint8, len(part), page * PAGE), np.frombuffer(part, np.uint8))
        return page

    def close(self) -> None:
        """Let go of it; the other side keeps what it has."""
        if self._file >= 0:
            os.close(self._file)
            self._file, self._map = -1, None
            self._heap = Heap(first=0, end=0)
            _ALLOWANCE.give(self._filled * PAGE)

    def _take_back(self, memory: mmap.mmap) -> None:
        """Free the places that the other side needs no more."""
        given, page = memory[: self._filled], 0
        while (page := given.find(FREE, page)) >= 0:
            memory[page] = 0
            if page in self._heap:
                self._heap.give_back(page)
            page += 1

    def _filled_to(self, end: int) -> mmap.mmap | None:
        """Return the memory, of which the pages up to ``end`` are there; None where they cannot be."""
        if end > self._filled:
            more = (end - self._filled) * PAGE
            if not _ALLOWANCE.take(more):
                return None
            try:
                os.posix_fallocate(self._file, self._filled * PAGE, more)
                self._map = self._map or mmap.mmap(self._file, self._pages * PAGE)
            except (OSError, ValueError):
                _ALLOWANCE.give(more)
                return None
            self._filled = end
        return self._map
