"""What a peer lends of the arenas of others, used where it lies: the other side of ``lending``.

Invariants: files are as those of ``memfd``; what is borrowed can be read only, and lies within a file that came; its
token is given back when the last view of it is gone, in whichever thread.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncflow.errors import ProtocolError
from asyncflow.net.arena import memfd
from asyncflow.net.arena.lending import MOST_FILES, inode_of
from asyncflow.net.arena.loans import Incoming, address_of, owner_of
from asyncflow.net.arena.memfd import PAGE, SHOWN


class Borrowed(mmap.mmap):
    """The memory of a file that was lent."""

    def __init__(self, *_: int) -> None:
        self.address = address_of(self)
        self.process = os.getpid()


class Mark(NamedTuple):
    """What a lender says of a part that it has lent. It means something as long as the part is looked at."""

    file: weakref.ref[Borrowed]
    page: int

    @property
    def shown(self) -> bool:
        """Whether the part is still what its lender would give; False in processes that were forked."""
        file = self.file()
        return file is not None and file[self.page] == SHOWN and file.process == os.getpid()


def mark_of(values: npt.NDArray[Any]) -> Mark | None:
    """Give the mark of the place that begins with ``values``; None for what is not borrowed."""
    file = owner_of(values)
    if not isinstance(file, Borrowed):
        return None
    return Mark(weakref.ref(file), (address_of(values.data) - file.address) // PAGE)


class Borrowing(Incoming):
    """The receiver's side of an arena whose peer may lend what lies in others."""

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self._came: deque[int] = deque()
        self._files: dict[int, Borrowed] = {}

    def come(self, files: list[int]) -> None:
        """Take in files, which this owns from now on."""
        self._came += files
        if len(self._came) > MOST_FILES:
            raise ProtocolError(f"a peer of this host brought {len(self._came)} files")
        for file in files:
            memfd.check(file)

    def borrow(self, number: int, *, inode: int | None, token: int, offset: int, size: int) -> memoryview:
        """Give a part that lies in a file of that number; inode: bits of its own, where it is the next that came."""
        mapping = self._mapping or self._mapped()
        if inode is not None:
            self._open(number, inode)
        file = self._files.get(number)
        if file is None or offset + size > len(file):
            raise ProtocolError(f"a part of {size} bytes cannot lie at byte {offset} of file {number}")
        if not self._first <= token < self._pages or token in mapping.loans:
            raise ProtocolError(f"page {token} of {self._pages} cannot be a token")
        there = np.frombuffer(file, np.uint8, size, offset)
        self._lend(mapping, there, page=token, size=0)
        return there.data

    def close(self) -> None:
        """Take nothing any more; what is borrowed stays."""
        super().close()
        self._files.clear()
        while self._came:
            os.close(self._came.popleft())

    def _open(self, number: int, inode: int) -> None:
        if number >= MOST_FILES or not self._came:
            raise ProtocolError(f"there is no file {number}")
        file = self._came.popleft()
        try:
            if inode_of(file) != inode:
                raise ProtocolError(f"what came is not file {number}")
            self._files[number] = Borrowed(file, os.fstat(file).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a file of a peer cannot be read: {error}") from error
        finally:
            os.close(file)
