"""Shared memory between two processes of one host, for the large parts of messages (``framing``) of one connection.

*Socket.* A server listens at a name in the abstract namespace that says its address; a caller of that address tries the
name first, and hands over an arena for each direction with its first bytes, first the one that it fills. Such names end
at this host, and with their process.

*Arena.* A file without a name (memfd), which ends with the last process that has it open or mapped. It begins with one
byte for each of its pages. The sender knows which pages are free, copies a part there and says where; the receiver uses
the part where it lies (a *loan*), and when the last view of it is gone, in whichever thread, sets the byte of its first
page, of which the sender learns when it needs pages next. At most half of an arena is in use: what comes then is copied
out. Memory is mapped as long as a loan lasts, also after the connection and the sender have ended. A part that finds no
room is sent as any other; nobody waits for room.

Invariants: both sides have checked that the other runs as the same user, else they do without, over TCP, and nothing is
lost; neither side can make the file shorter under the other, so no access to it ever fails; the sender believes of
those bytes only that places it has given out are free again, the receiver of a place only that it lies in the file and
begins where no other does that is still in use; a process has no more than ``MOST_FILLED`` bytes of pages that it has
begun to fill. A peer may change the bytes of a part that it has sent, as it could change any memory of this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import socket
import struct
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncflow.errors import ProtocolError


class Heap:
    """The pages from ``first`` up to ``end``. A place is named by its first page."""

    def __init__(self, *, first: int, end: int) -> None:
        self._first, self._end = first, end
        self._places: dict[int, int] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._places

    def take(self, pages: int) -> int | None:
        """Return the lowest place of so many pages, at least one; None where no run is long enough."""
        begin = self._first
        for place in sorted(self._places):
            if place - begin >= pages:
                break
            begin = place + self._places[place]
        if begin + pages > self._end:
            return None
        self._places[begin] = pages
        return begin

    def give_back(self, place: int) -> None:
        """Free a place that was taken."""
        del self._places[place]


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
    """Pages that this process may still begin to fill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken = 0

    def take(self, pages: int) -> bool:
        with self._lock:
            fits = (self.taken + pages) * PAGE <= MOST_FILLED
            self.taken += pages if fits else 0
        return fits

    def give(self, pages: int) -> None:
        with self._lock:
            self.taken -= pages


_ALLOWANCE = _Allowance()


def new_arena() -> int:
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
    """Raise ProtocolError where a file that a peer brought is none of ``new_arena``."""
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
        """Release it; the other side keeps what it has."""
        if self._file >= 0:
            os.close(self._file)
            self._file, self._map = -1, None
            self._heap = Heap(first=0, end=0)
            _ALLOWANCE.give(self._filled)

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
            more = end - self._filled
            if not _ALLOWANCE.take(more):
                return None
            try:
                os.posix_fallocate(self._file, self._filled * PAGE, more * PAGE)
                self._map = self._map or mmap.mmap(self._file, self._pages * PAGE)
            except (OSError, ValueError):
                _ALLOWANCE.give(more)
                return None
            self._filled = end
        return self._map


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
        self._most_in_use = self._pages * PAGE // 2
        self._mapping: _Mapping | None = None
        self._in_use = 0

    def take(self, page: int, size: int) -> memoryview:
        """Return a part that the sender has put there."""
        mapping = self._mapping or self._mapped()
        ended = mapping.ended
        while ended:
            self._in_use -= ended.popleft()
        if not self._first <= page < page + pages_of(size) <= self._pages:
            raise ProtocolError(f"a part of {size} bytes cannot lie at page {page} of {self._pages}")
        if page in mapping.loans:
            raise ProtocolError(f"a part of {size} bytes cannot lie at page {page}, where another one does")
        there = np.frombuffer(mapping, np.uint8, size, page * PAGE)
        if self._in_use + size > self._most_in_use:
            copied = there.copy()
            mapping[page] = FREE
            return copied.data
        loan = _Loan(there, _ended)
        loan.mapping, loan.page, loan.size = mapping, page, size
        mapping.loans[page] = loan
        self._in_use += size
        return there.data

    def close(self) -> None:
        """Take nothing any more; what is in use stays."""
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


SHARED_MEMORY_ENV = "ASYNCFLOW_SHARED_MEMORY"
"""Variable that switches shared memory off where it is ``off``."""
_MAGIC = b"AFm3"
_LONGEST_NAME = 107
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


class Arenas(NamedTuple):
    """The memory of one connection: for what this side sends, and for what comes."""

    outgoing: Outgoing
    incoming: Incoming

    def close(self) -> None:
        """Release both; what is in use stays."""
        self.outgoing.close()
        self.incoming.close()


def dialled(address: str) -> tuple[socket.socket, Arenas] | None:
    """Connect to whoever listens at ``address`` on this host, and hand over new arenas; None where that is nobody."""
    name = _name(address)
    if name is None:
        return None
    files: list[int] = []
    made = socket.socket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        made.connect(name)
        if is_same_user(made):
            files.extend(new_arena() for _ in range(2))  # one by one: the first is closed if there is no second
            socket.send_fds(made, [_MAGIC], files)
            return made, Arenas(Outgoing(files[0]), Incoming(files[1]))
    except OSError:
        for file in files:
            os.close(file)
    made.close()
    return None


def received(caller: socket.socket) -> Arenas:
    """Take in the arenas that a caller of this host hands over first. Raises ProtocolError where it has none."""
    came, files, _, _ = socket.recv_fds(caller, len(_MAGIC), 2, socket.MSG_CMSG_CLOEXEC)
    try:
        if came != _MAGIC or len(files) != 2:
            raise ProtocolError("a peer of this host brought no arenas")
        for file in files:
            check(file)
    except ProtocolError:
        for file in files:
            os.close(file)
        raise
    return Arenas(Outgoing(files[1]), Incoming(files[0]))


def listening(address: str) -> socket.socket | None:
    """Listen to callers of this host that dial ``address``; None where that cannot be."""
    name = _name(address)
    if name is None:
        return None
    made = socket.socket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        made.bind(name)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        return None
    return made


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the peer runs as this user, and that can be known: users without a number here share one."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid() and user != _nobody())


@functools.cache
def _nobody() -> int:
    """Return the number by which users are seen that have none in this namespace."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _name(address: str) -> bytes | None:
    if os.environ.get(SHARED_MEMORY_ENV) == "off" or not hasattr(os, "memfd_create"):
        return None
    name = f"\0asyncflow/{address.partition('://')[2]}".encode()
    return name if len(name) <= _LONGEST_NAME else None
