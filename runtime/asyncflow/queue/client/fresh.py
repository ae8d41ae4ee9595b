"""Which answers that were promised to a client may still be taken instead of asking.

Invariants: an answer that may be taken was promised to a claim that began after whatever this client wrote was done,
by whichever lane; so a client reads what it has written. It was promised no longer than ``FRESH_S`` ago, which bounds
how long what others write is not seen. May be used by several threads at once.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

from asyncflow.queue.client.verbs import Clock, Place, Verb
from asyncflow.queue.protocol.unit_calls import FetchRows

T = TypeVar("T")
FRESH_S = 1.0
"""Seconds since the answer to a claim within which what was sent ahead for it is taken."""


class _Promise(NamedTuple):
    unit: int
    request: FetchRows
    place: Place
    until: float


Promises: TypeAlias = dict[int, _Promise]
"""Promises by seat: a lane has one at most."""


class Fresh:
    """What one client may take. clock: seconds that only grow."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._promises: Promises = {}

    def since(self) -> Promises:
        """Give where a claim that begins now notes what it is promised; nobody looks there after ``forget``."""
        return self._promises

    def note(self, promises: Promises, unit: int, request: FetchRows, place: Place) -> None:
        """Note that ``unit`` has sent its answer to ``request`` to ``place``. promises: of when the claim began."""
        promises[place.seat] = _Promise(unit, request, place, self._clock() + FRESH_S)

    def take(self, unit: int, request: FetchRows) -> Place | None:
        """Give the place of the answer, once; None where it must be asked for."""
        promises = self._promises
        for seat, promise in list(promises.items()):
            if promise.unit == unit and promise.request == request:
                promises.pop(seat, None)
                return promise.place if self._clock() < promise.until else None
        return None

    def forget(self) -> None:
        """Let nothing be taken that was promised up to now, or is promised to a claim that has begun."""
        self._promises = {}

    def changing(self, verb: Verb[T]) -> Verb[T]:
        """Do a verb that changes what units answer; whether or not it succeeds, nothing older is taken after it."""
        try:
            return (yield from verb)
        finally:
            self.forget()
