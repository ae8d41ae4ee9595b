"""Coroutines that begin at once: what need not wait is done without a task, and without a turn of the loop.

Invariant: whoever calls ``begin`` gets the result, or a task that goes on where the coroutine first waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
    """Run ``work`` until it waits, in the caller's place: up to there it has no task of its own.

    So ``asyncio.timeout`` and ``current_task`` are not for its first part.
    """
    try:
        waited = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    return asyncio.get_running_loop().create_task(_Begun(work, waited))


class _Begun(Coroutine[Any, Any, T]):
    """A coroutine that waits for something already, which its task hears of first."""

    def __init__(self, work: Coroutine[Any, Any, T], waited: Any) -> None:
        self._work = work
        self._waited = waited
        self._told = False

    def send(self, value: Any) -> Any:
        if self._told:
            return self._work.send(value)
        self._told = True
        return self._waited

    def throw(self, *error: Any) -> Any:
        self._told = True
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise TypeError("only its task goes on with it")
