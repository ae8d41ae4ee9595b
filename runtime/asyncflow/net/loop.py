"""The event loop of roles: readers are called where the poll finds them, as long as nothing else is to be done.

So a message that comes and is answered at once passes neither a handle, a context and a queue, nor the loop's own turn;
and where messages come soon after one another the loop looks for them before it sleeps (``lookout``). All else is
asyncio's, whose own poll is one of the things that are polled here.

Invariants: a reader that was removed is not called any more; one that fails is logged and harms no other; callbacks and
timers are not kept waiting by readers for longer than the readers of one poll take.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import select
import selectors
from collections.abc import Callable
from contextvars import Context
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVarTuple, Unpack

from asyncflow.net.lookout import Lookout

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

    def call_soon(
        self, callback: Callable[[Unpack[_Asked]], object], *args: *_Asked, context: Context | None = None
    ) -> asyncio.Handle:
        """Have ``callback`` called in the next turn."""
        self._poll.due = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Asked]], object], *args: *_Asked, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Have ``callback`` called at ``when``."""
        self._poll.due = True
        return super().call_at(when, callback, *args, context=context)

    def stop(self) -> None:
        """End with this turn."""
        self._poll.due = True
        super().stop()


class _Poll(selectors.EpollSelector):
    """Asyncio's selector, and the readers. due: whether the loop was asked for something since the poll began.

    What other threads and signals ask for comes through a socket that asyncio watches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.due = False
        self._others = self.fileno()
        self._readers: dict[int, Callable[..., object]] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._others, select.EPOLLIN)
        self._look = functools.partial(self._epoll.poll, 0, _MOST)
        self._lookout = Lookout()

    def watch(self, fd: int, reader: Callable[..., object]) -> None:
        if fd in self._readers:
            self._epoll.modify(fd, select.EPOLLIN)
        else:
            self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def leave(self, fd: int) -> bool:
        if self._readers.pop(fd, None) is None:
            return False
        with contextlib.suppress(OSError):  # it was closed already
            self._epoll.unregister(fd)
        return True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        others = self.due = False
        until = monotonic() + timeout if timeout else None
        while True:
            for fd, _ in self._found(timeout):
                if (reader := self._readers.get(fd)) is not None:
                    try:
                        reader()
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException:
                        log.exception("%r failed", reader)
                else:
                    others = others or fd == self._others
            if others or self.due or timeout == 0:
                return super().select(0) if others else []  # not before: a reader may close what asyncio watches
            if until is not None:
                timeout = max(0, until - monotonic())

    def _found(self, timeout: float | None) -> list[tuple[int, int]]:
        if timeout == 0:
            return self._look()
        return self._lookout.wait(self._look, functools.partial(self._epoll.poll, timeout, _MOST))

    def close(self) -> None:
        self._readers.clear()
        self._epoll.close()
        super().close()


def _number(fd: FileDescriptorLike) -> int:
    return fd if isinstance(fd, int) else fd.fileno()
