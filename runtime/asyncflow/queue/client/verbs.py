"""What a verb of the queue is: a generator that yields what is to be done, and is sent what came of it.

A verb decides which calls to make, in which order, and what to do about losses. Somebody else makes them, a *runner*:
``connections`` in an event loop, ``lane`` in a thread that blocks. So no verb is written twice.

What runners promise: ``Ask`` gives (reply, frames) or throws an AsyncFlowError into the verb, after its timeout at the
latest; ``Pause`` gives None after its seconds; ``Together`` gives the results of its verbs in their order, or throws
the error of the first that failed, after the others were ended; ``Farewell`` gives None, and its call is made, without
awaiting an answer, when the caller leaves the verb (is cancelled or interrupted) from then on.

Invariant: a verb does no I/O and knows no event loop. What it repeats may be repeated (see ``calls``).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.net.frames import Buffer
from asyncflow.queue.client.scatter import parts_by

T = TypeVar("T")
R = TypeVar("R", bound=Struct)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_SHORTEST_S = 0.001


Peer: TypeAlias = int | None
"""Who is asked: a unit by its index, the controller (None), or a further one where there are several (``shard``)."""


def shard(controller: int) -> Peer:
    """Return the peer that is the controller with this number."""
    return -controller or None


def name_of(peer: Peer) -> str:
    """Return the words for a peer."""
    if peer is None:
        return "the controller"
    return f"storage unit {peer}" if peer >= 0 else f"controller {-peer}"


class Ask(Struct, frozen=True, eq=False):
    """A call. unit: whom it asks, a ``Peer``; timeout: seconds for all of it."""

    unit: Peer
    method: str
    request: Struct
    reply: type[Struct]
    timeout: float
    frames: Sequence[Buffer] = ()


class Pause(Struct, frozen=True, eq=False):
    """Some time without doing anything."""

    seconds: float


class Together(Struct, frozen=True, eq=False):
    """Verbs, at least one, that go on at once."""

    verbs: list[Verb[Any]]


class Farewell(Struct, frozen=True, eq=False):
    """What is said if the caller leaves."""

    ask: Ask


Effect: TypeAlias = Ask | Pause | Together | Farewell
Verb: TypeAlias = Generator[Effect, Any, T]
Clock: TypeAlias = Callable[[], float]


def once(
    unit: Peer, method: str, request: Struct, reply: type[R], *, timeout: float, frames: Sequence[Buffer] = ()
) -> Verb[tuple[R, list[memoryview]]]:
    """Make one call; give the reply and its frames."""
    answer: tuple[R, list[memoryview]] = yield Ask(unit, method, request, reply, timeout, frames)
    return answer


def left_of(deadline: float, clock: Clock) -> float:
    """Return the seconds until ``deadline``, a moment at least."""
    return max(_SHORTEST_S, deadline - clock())


def persist(attempt: Callable[[], Verb[T]], *, what: str, timeout: float, clock: Clock) -> Verb[T]:
    """Do ``attempt()`` again and again until it succeeds, for ``timeout`` seconds in all.

    Only PeerLost and DeadlineExceeded are tried again, after a growing pause with jitter; other errors pass through.
    Raises DeadlineExceeded that says ``what`` was waited for, the last error, and what the peer itself said last.
    """
    deadline = clock() + timeout
    pause, said = _FIRST_PAUSE_S, ""
    while True:
        try:
            return (yield from attempt())
        except (PeerLost, DeadlineExceeded) as error:
            last: AsyncFlowError = error
            said = f"; it said: {error}" if error.told else said
        nap, left = pause * random.uniform(0.5, 1.0), deadline - clock()
        if nap >= left:
            last_words = f"{last}" if last.told else f"{last}{said}"
            raise DeadlineExceeded(f"{what} did not succeed within {timeout:g} s; last: {last_words}") from last
        yield Pause(nap)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def together(verbs: Iterable[Verb[T]]) -> Verb[list[T]]:
    """Do ``verbs`` at once; when one fails the others are ended."""
    made = list(verbs)
    if len(made) == 1:
        return [(yield from made[0])]
    results: list[T] = (yield Together(made)) if made else []
    return results


def scatter(keys: Iterable[Hashable], send: Callable[[Sequence[int]], Verb[list[T]]]) -> Verb[list[T]]:
    """Send the indices of equal ``keys`` together; give the answers, one for each index, in order."""
    parts = parts_by(keys)
    answers = yield from together(send(indices) for indices in parts.values())
    if len(answers) == 1:
        return answers[0]
    by_index = dict(zip(itertools.chain(*parts.values()), itertools.chain(*answers), strict=True))
    return [by_index[index] for index in range(len(by_index))]
