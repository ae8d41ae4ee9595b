"""Memory that two processes of one host share for one connection: a ring for what goes, and one for what comes.

It is a file without a name (memfd), which ends with the last process that has it open: nothing can be left behind. The
caller makes it and hands it to the answerer; the first half is filled by the caller, the second by the answerer. It has
no pages before it is used, and the same ones from then on.

Invariants: neither side can make the file shorter under the other, so no access to it ever fails; a process has no more
than ``MOST_FILLED`` bytes of rings that it has begun to fill, and whoever finds none left goes without.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from typing import TypeAlias

import numpy as np

from asyncflow.errors import ProtocolError

HALF = 4 << 20
"""Bytes of a ring."""
MOST_FILLED = 256 << 20
_LARGEST = 64 << 20
_NAME = "asyncflow"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_Memory: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"


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


class Arena:
    """One connection's. file: its descriptor, which the arena owns; half: bytes of each ring."""

    def __init__(self, file: int, *, half: int, calls: bool) -> None:
        self.file = file
        self.half = half
        self._begins = {True: 0 if calls else half, False: half if calls else 0}
        self._map: mmap.mmap | None = None
        self._memory: _Memory | None = None
        self._fills: bool | None = None

    @classmethod
    def made(cls) -> Arena:
        """Make one, as the caller. Raises OSError where this host does not let it."""
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, 2 * HALF)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(file)
            raise
        return cls(file, half=HALF, calls=True)

    @classmethod
    def taken(cls, file: int) -> Arena:
        """Take the one that a caller made, and its descriptor. ProtocolError for any other file."""
        try:
            size = os.fstat(file).st_size
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstatvfs(file).f_bsize != mmap.PAGESIZE:
                raise ProtocolError("a peer wants to share a file that is no arena")
            if not 0 < size <= 2 * _LARGEST or size % (2 * mmap.PAGESIZE):
                raise ProtocolError(f"a peer wants to share {size} bytes")
        except OSError as error:
            os.close(file)
            raise ProtocolError(f"a peer wants to share a file that is no arena: {error}") from error
        except ProtocolError:
            os.close(file)
            raise
        return cls(file, half=size // 2, calls=False)

    def can_fill(self) -> bool:
        """Whether there is memory for what goes; the first time it is got, or not."""
        if self._fills is None:
            self._fills = _ALLOWANCE.take(self.half)
            if self._fills:
                try:
                    os.posix_fallocate(self.file, self._begins[True], self.half)
                    self._mapped()
                except (OSError, ValueError):
                    _ALLOWANCE.give(self.half)
                    self._fills = False
        return self._fills

    def fill(self, place: slice, source: memoryview) -> None:
        """Put bytes into the ring of what goes."""
        np.copyto(self._ring(fills=True)[place], np.frombuffer(source, np.uint8))

    def empty(self, place: slice, target: memoryview) -> None:
        """Copy bytes out of the ring of what comes."""
        np.copyto(np.frombuffer(target, np.uint8), self._ring(fills=False)[place])

    def close(self) -> None:
        """Give the memory back."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            self._memory = None
            if self._map is not None:
                self._map.close()
            if self._fills:
                _ALLOWANCE.give(self.half)
            self._fills = False

    def _ring(self, *, fills: bool) -> _Memory:
        begin = self._begins[fills]
        return self._mapped()[begin : begin + self.half]

    def _mapped(self) -> _Memory:
        if self._memory is None:
            self._map = mmap.mmap(self.file, 2 * self.half)
            self._memory = np.frombuffer(self._map, np.uint8)
        return self._memory
