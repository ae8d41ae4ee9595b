"""An answer that comes later, told where it is given: as ``asyncio.Future``, but without a turn of the loop.

Invariants: it is given once, and whoever was added is told once, at once, in the place of who gives it; one that fails
at that is logged, and harms neither the giver nor the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class Later(Generic[T]):
    """See ``asyncio.Future``, whose methods it has."""

    __slots__ = ("_cancelled", "_done", "_error", "_result", "_told")

    def __init__(self) -> None:
        self._done = False
        self._cancelled = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._told: list[Callable[[Later[T]], object]] = []

    def done(self) -> bool:
        """Whether it was given, or is not wanted any more."""
        return self._done

    def cancelled(self) -> bool:
        """Whether nobody wanted it any more."""
        return self._cancelled

    def cancel(self) -> bool:
        """Say that nobody wants it any more; True unless it was done."""
        if self._done:
            return False
        self._cancelled = True
        self._error = asyncio.CancelledError()
        self._tell()
        return True

    def set_result(self, result: T) -> None:
        """Set the result."""
        self._check_open()
        self._result = result
        self._tell()

    def set_exception(self, error: BaseException) -> None:
        """Set an error instead."""
        self._check_open()
        self._error = error
        self._tell()

    def result(self) -> T:
        """Return what was given; raises the error."""
        if not self._done:
            raise asyncio.InvalidStateError("it was not given yet")
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def add_done_callback(self, told: Callable[[Later[T]], object]) -> None:
        """Have ``told`` called when it is done, or now if it is."""
        if self._done:
            self._call(told)
        else:
            self._told.append(told)

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait for it; who is cancelled meanwhile does not cancel it."""
        if not self._done:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._told.append(lambda _: None if turn.done() else turn.set_result(None))
            yield from turn
        return self.result()

    def _check_open(self) -> None:
        if self._done:
            raise asyncio.InvalidStateError("it was given already")

    def _tell(self) -> None:
        self._done = True
        waiting, self._told = self._told, []
        for told in waiting:
            self._call(told)

    def _call(self, told: Callable[[Later[T]], object]) -> None:
        try:
            told(self)
        except Exception:
            log.exception("%r failed when it was told", told)
