"""Calls that have to end at their deadline, with an error that says what happened until then."""

import re
from collections.abc import Awaitable, Callable

import pytest

from asyncflow.errors import DeadlineExceeded


async def ends_late(call: Callable[[float], Awaitable[object]], *, says: str, within_s: float = 0.3) -> None:
    """Make a call that ends at its deadline, and check its error.

    Nothing happens until the deadline if this machine stands still: then the call is made again with more time.
    """
    for timeout in (within_s, 10 * within_s, 100 * within_s):
        with pytest.raises(DeadlineExceeded) as late:
            await call(timeout)
        if re.search(says, str(late.value)):
            return
    raise late.value
