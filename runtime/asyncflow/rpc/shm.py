"""Shared memory between two processes of one host, for the large parts of messages (``framing``) of one connection.

*Socket.* A server listens in the abstract namespace under a name made from its address. A caller tries that name first,
and with its first bytes hands over an arena for each direction, first the arena that it fills. The names are visible on
this host only, and end with their process.

*Arena.* A file without a name (memfd), which ends with the last process that has it open or mapped. It begins with one
byte for each of its pages. The sender knows the free pages, copies a part into some, and sends the location. The
receiver uses the part in place (a *loan*). When the last view of it is released, in any thread, the receiver sets the
byte of the part's first page; the sender reads that byte when it next needs pages. At most half of an arena is on loan:
further parts are copied out. Memory is mapped as long as a loan lasts, even after the connection and the sender have
ended. A part for which there is no room is sent over the socket; no process waits for room.

Invariants: both sides verify that the other one runs as the same user, otherwise they use TCP and lose nothing. Neither
side can shrink the file, so no access to it ever fails. The sender trusts those bytes only to free places that it has
used, the receiver trusts a place only if it lies in the file and begins at no page of a loan. A process allocates at
most ``MOST_FILLED`` bytes of pages. A peer may change the bytes of a part after sending it, as the same user could
change any memory of this process.
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
    """The pages from ``first`` up to ``end``. A place is identified by its first page."""

    def __init__(self, *, first: int, end: int) -> None:
        self._first, self._end = first, end
        self._places: dict[int, int] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._places

    def take(self, pages: int) -> int | None:
        """Return the lowest place of so many pages, at least one; None if no free run is long enough."""
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
        """Free a place."""
        del self._places[place]


SIZE = 256 << 20
"""Bytes of an arena."""
PAGE = mmap.PAGESIZE
FREE = 1
"""Value of the byte of a place's first page when its part is no longer in use."""
MOST_FILLED = 512 << 20
_LARGEST = 1 << 30
_NAME = "asyncflow"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Allowance:
    """Counts the pages that this process has allocated in arenas, up to ``MOST_FILLED`` bytes."""

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
    """Make the file of an arena. Raises OSError if this host does not support it."""
    file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, SIZE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


def check(file: int) -> None:
    """Raise ProtocolError if a file received from a peer is not an arena made by ``new_arena``."""
    try:
        size = os.fstat(file).st_size
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not sealed or os.fstatvfs(file).f_bsize != PAGE:
            raise ProtocolError("a peer wants to share a file that is not an arena")
    except OSError as error:
        raise ProtocolError(f"a peer wants to share a file that is not an arena: {error}") from error
    if not 0 < size <= _LARGEST or size % PAGE:
        raise ProtocolError(f"a peer wants to share {size} bytes")


def pages_of(size: int) -> int:
    """Return the number of pages for ``size`` bytes."""
    return -(-size // PAGE)


class Outgoing:
    """The sender's side of an arena. file: its descriptor, which this object closes."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._pages = os.fstat(file).st_size // PAGE
        self._heap = Heap(first=pages_of(self._pages), end=self._pages)
        self._map: mmap.mmap | None = None
        self._filled = 0

    def put(self, part: memoryview) -> int | None:
        """Copy a part into the arena; return its first page, None if there is no room."""
        pages = pages_of(len(part))
        if self._map is not None:
            self._reclaim(self._map)
        page = self._heap.take(pages)
        if page is None:
            return None
        memory = self._allocate_to(page + pages)
        if memory is None:
            self._heap.give_back(page)
            return None
        np.copyto(np.frombuffer(memory, np.uint8, len(part), page * PAGE), np.frombuffer(part, np.uint8))
        return page

    def close(self) -> None:
        """Release the arena; the receiver keeps its loans."""
        if self._file >= 0:
            os.close(self._file)
            self._file, self._map = -1, None
            self._heap = Heap(first=0, end=0)
            _ALLOWANCE.give(self._filled)

    def _reclaim(self, memory: mmap.mmap) -> None:
        """Free the places that the receiver has released."""
        released, page = memory[: self._filled], 0
        while (page := released.find(FREE, page)) >= 0:
            memory[page] = 0
            if page in self._heap:
                self._heap.give_back(page)
            page += 1

    def _allocate_to(self, end: int) -> mmap.mmap | None:
        """Return the memory after allocating the pages up to ``end``; None if they cannot be allocated."""
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
    """The mapped memory of an arena, which the views of loans keep alive, with the data needed when they end.

    loans: by first page; ended: sizes of ended loans, to be subtracted by ``Incoming``; process: the receiving process,
    because its forks must not release anything.
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
    """A weak reference to the array of a loan, which ends with the array."""

    __slots__ = ("mapping", "page", "size")
    mapping: _Mapping
    page: int
    size: int


def _ended(loan: weakref.ref[npt.NDArray[np.uint8]]) -> None:
    """Release the pages of a loan. It may run between any two steps of any thread, so it takes no lock."""
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
    """The receiver's side of an arena. file: its descriptor, which this object closes."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._pages = os.fstat(file).st_size // PAGE
        self._first = pages_of(self._pages)
        self._most_in_use = self._pages * PAGE // 2
        self._mapping: _Mapping | None = None
        self._in_use = 0

    def take(self, page: int, size: int) -> memoryview:
        """Return a part that the sender has put at ``page``."""
        mapping = self._mapping or self._map_file()
        ended = mapping.ended
        while ended:
            self._in_use -= ended.popleft()
        if not self._first <= page < page + pages_of(size) <= self._pages:
            raise ProtocolError(f"a part of {size} bytes cannot lie at page {page} of {self._pages}")
        if page in mapping.loans:
            raise ProtocolError(f"a part of {size} bytes cannot lie at page {page}, which is in use")
        part = np.frombuffer(mapping, np.uint8, size, page * PAGE)
        if self._in_use + size > self._most_in_use:
            copied = part.copy()
            mapping[page] = FREE
            return copied.data
        loan = _Loan(part, _ended)
        loan.mapping, loan.page, loan.size = mapping, page, size
        mapping.loans[page] = loan
        self._in_use += size
        return part.data

    def close(self) -> None:
        """Stop receiving; existing loans stay valid."""
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

    def _map_file(self) -> _Mapping:
        if self._file < 0:
            raise ProtocolError("a part came through an arena that is closed")
        mapping = self._mapping = _Mapping(self._file, self._pages * PAGE)
        os.close(self._file)
        self._file = -1
        return mapping


SHARED_MEMORY_ENV = "ASYNCFLOW_SHARED_MEMORY"
"""Variable that disables shared memory if it is ``off``."""
_MAGIC = b"AFm3"
_LONGEST_NAME = 107
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


class Arenas(NamedTuple):
    """The memory of one connection: for sent and for received parts."""

    outgoing: Outgoing
    incoming: Incoming

    def close(self) -> None:
        """Release both; existing loans stay valid."""
        self.outgoing.close()
        self.incoming.close()


def dialled(address: str) -> tuple[socket.socket, Arenas] | None:
    """Connect to the server of ``address`` on this host, and hand over new arenas; None if there is no such server."""
    name = _name(address)
    if name is None:
        return None
    files: list[int] = []
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(name)
        if is_same_user(sock):
            files.extend(new_arena() for _ in range(2))  # one by one: the first is closed if the second fails
            socket.send_fds(sock, [_MAGIC], files)
            return sock, Arenas(Outgoing(files[0]), Incoming(files[1]))
    except OSError:
        for file in files:
            os.close(file)
    sock.close()
    return None


def received(caller: socket.socket) -> Arenas:
    """Receive the arenas that a caller of this host hands over first. Raises ProtocolError if there are none."""
    magic, files, _, _ = socket.recv_fds(caller, len(_MAGIC), 2, socket.MSG_CMSG_CLOEXEC)
    try:
        if magic != _MAGIC or len(files) != 2:
            raise ProtocolError("a peer of this host sent no arenas")
        for file in files:
            check(file)
    except ProtocolError:
        for file in files:
            os.close(file)
        raise
    return Arenas(Outgoing(files[1]), Incoming(files[0]))


def listening(address: str) -> socket.socket | None:
    """Listen to callers of this host that dial ``address``; None if this is not possible."""
    name = _name(address)
    if name is None:
        return None
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        return None
    return sock


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the peer certainly runs as this user. Users unknown in this namespace all have the same number."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid() and user != _overflow_uid())


@functools.cache
def _overflow_uid() -> int:
    """Return the number that the kernel shows for users without a number in this namespace."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _name(address: str) -> bytes | None:
    if os.environ.get(SHARED_MEMORY_ENV) == "off" or not hasattr(os, "memfd_create"):
        return None
    name = f"\0asyncflow/{address.partition('://')[2]}".encode()
    return name if len(name) <= _LONGEST_NAME else None
