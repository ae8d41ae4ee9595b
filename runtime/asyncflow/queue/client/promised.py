"""The answer that a unit sends a lane unasked: it was told to do what the lane is about to ask for.

Invariants: at most one answer is kept, that of the last promise; whoever waits for it in vain has at least half of the
time left to ask; it is taken only from the link by which the unit knew the lane when the promise was asked for.
Whether it may be taken still is for the verbs to say (``fresh``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.blocking_link import LOOK_S, BlockingLink
from asyncflow.queue.client.links import Links, answer_to
from asyncflow.queue.client.verbs import Ask, Expect, Place


class Promised:
    """What one lane was promised."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._promise: tuple[Expect, BlockingLink] | None = None
        self._came: Sequence[memoryview] = ()

    def reserve(self) -> Place:
        """Give a new place for an answer; what was promised before is dropped."""
        self.drop()
        return Place(self._links.seat, next(self._links.numbers))

    def expect(self, expect: Expect) -> None:
        """Count on an answer, if the unit knew this lane when its place was reserved."""
        self._forget()
        if (link := self._links.since(expect.unit, expect.place.call)) is not None:
            self._promise = expect, link

    def drop(self) -> None:
        """Count on nothing any more.

        What is there of the answer is read, at least a piece; what comes later is read with the next call to that unit.
        """
        if self._promise is not None and not self._came:
            self._receive(*self._promise, 0.0)
        self._forget()

    def keep(self, call: int, parts: Sequence[memoryview], error: AsyncFlowError | None) -> None:
        """Keep an answer for which nobody waits yet, if it is the one; where it is an error, count on nothing more."""
        if self._promise is None or self._promise[0].place.call != call:
            return
        if error is None:
            self._came = parts
        else:
            self._forget()

    def take(self, ask: Ask, seconds: float) -> tuple[Any, Sequence[memoryview]] | None:
        """Give reply and frames of what ``ask`` asks for if they were promised so and come soon.

        seconds: what is left for the call, of which no more than half is spent.
        Raises ProtocolError for what is no such reply.
        """
        if self._promise is None:
            return None
        expect, link = self._promise
        if expect.unit != ask.unit or expect.place != ask.promised:
            return None
        if not self._came:
            self._receive(expect, link, min(LOOK_S, seconds / 4))
        came = self._came
        self._forget()
        return answer_to(ask, came, where=link.address) if came else None

    def _forget(self) -> None:
        self._promise, self._came = None, ()

    def _receive(self, expect: Expect, link: BlockingLink, seconds: float) -> None:
        """Read what comes on a link until that is what was promised, or ``seconds`` are over.

        A link sleeps for what it is given once more where pieces of a message come, so it may take twice as long.
        """
        until = time.monotonic() + seconds
        left = seconds
        with contextlib.suppress(PeerLost, DeadlineExceeded):  # who asks finds out whether the unit can be reached
            while self._promise is not None and not self._came:
                if parts := self._links.receive(link, expect.unit, left):
                    call, error = wire.read_answer(parts, where=link.address)
                    self.keep(call, parts, error)
                elif left <= 0:
                    return
                left = max(0.0, until - time.monotonic())
