"""The event loop of roles: a reader is called where the poll finds it, with no handle, context and queue between.

What else a loop does is asyncio's, whose own poll is one of the things that are polled here.

Invariants: a reader that was removed is not called any more; one that fails is logged and harms no other.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import select
import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

log = logging.getLogger(__name__)

_Asked = TypeVarTuple("_Asked")
_MOST = 64
"""Sockets that one poll gives; the others come first in the next."""


class Loop(asyncio.SelectorEventLoop):
    """As asyncio's own."""

    def __init__(self) -> None:
        self._poll = _Poll()
        super().__init__(self._poll)

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[Unpack[_Asked]], Any], *args: *_Asked) -> None:
        """Have ``callback`` called whenever ``fd`` can be read."""
        self._poll.watch(_number(fd), functools.partial(callback, *args) if args else callback)

    def remove_reader(self, fd: FileDescriptorLike) -> bool:
        """Call nobody any more, and say whether there was somebody."""
        return self._poll.leave(_number(fd))


class _Poll(selectors.EpollSelector):
    """Asyncio's selector, and the readers."""

    def __init__(self) -> None:
        super().__init__()
        self._others = self.fileno()
        self._readers: dict[int, Callable[..., object]] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._others, select.EPOLLIN)

    def watch(self, fd: int, reader: Callable[..., object]) -> None:
        if fd not in self._readers:
            self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def leave(self, fd: int) -> bool:
        if self._readers.pop(fd, None) is None:
            return False
        self._epoll.unregister(fd)
        return True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        others = False
        for fd, _ in self._epoll.poll(timeout, _MOST):
            if (reader := self._readers.get(fd)) is not None:
                try:
                    reader()
                except Exception:
                    log.exception("%r failed", reader)
            else:
                others = others or fd == self._others
        return super().select(0) if others else []  # now, since a reader may close what asyncio watches

    def close(self) -> None:
        self._readers.clear()
        self._epoll.close()
        super().close()


def _number(fd: FileDescriptorLike) -> int:
    return fd if isinstance(fd, int) else fd.fileno()
