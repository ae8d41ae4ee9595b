"""How a call reaches the units where rows lie, also when they moved since the caller was told.

A row is looked for where its holder was told that it lies, or where its id says. A unit that has it no more says so,
and one that is gone is not called: then the controller tells where the rows lie now.

Invariant: each row is answered for once, by the unit where it lies, or is named among those that lie nowhere; a unit
that is merely away is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from asyncflow.errors import DeadlineExceeded, Elsewhere, PeerLost
from asyncflow.queue.client.scatter import parts_by
from asyncflow.queue.client.verbs import Verb, left_of, persist, together
from asyncflow.queue.client.verbs_control import ControlVerbs
from asyncflow.queue.protocol.moving_calls import NOWHERE, AskWhere, Whereabouts
from asyncflow.queue.protocol.runs import expand_equal, shrink

_AWAITED_S = 5.0
"""How long a unit is called that takes nothing new, or is away, before the controller is asked again."""

T = TypeVar("T")
Part: TypeAlias = tuple[Sequence[int], T | None]
"""The indices of rows, and what came of them; None of those that lie nowhere."""
Send: TypeAlias = Callable[[int, Sequence[int], float], Verb[T]]
"""Makes one call at a unit for the rows with these indices, in so many seconds."""


def at_homes(
    verbs: ControlVerbs,
    numbers: Sequence[int],
    homes: Sequence[int],
    send: Send[T],
    *,
    apart: Sequence[Hashable] = (),
    what: str,
    timeout: float,
) -> Verb[list[Part[T]]]:
    """Have ``send`` make a call for the rows at each unit; give what came of each.

    homes: the unit where each of ``numbers`` was last known to lie; apart: for each what must be the same within one
    call. Errors pass through, but those after which a call is made again.
    """
    deadline = verbs.clock() + timeout
    parts = [(homes[at[0]], at) for at in parts_by(zip(homes, apart, strict=True) if apart else homes).values()]
    if len(parts) == 1 and parts[0][0] in verbs.units():
        unit, indices = parts[0]
        try:
            return [(indices, (yield from send(unit, indices, timeout)))]
        except (Elsewhere, PeerLost, DeadlineExceeded):
            pass  # then they are looked for as any others
    search = _Search(verbs, numbers, send, what=what, deadline=deadline)
    return (yield from search.all(parts))


class _Search(Generic[T]):
    """One verb's calls, until each of its rows is answered for."""

    def __init__(
        self, verbs: ControlVerbs, numbers: Sequence[int], send: Send[T], *, what: str, deadline: float
    ) -> None:
        self._verbs = verbs
        self._numbers = numbers
        self._send = send
        self._what = what
        self._deadline = deadline

    def all(self, homes: Sequence[tuple[int, Sequence[int]]]) -> Verb[list[Part[T]]]:
        """Call for the rows at each of ``homes``."""
        parts = yield from together([self._at(unit, indices) for unit, indices in homes])
        return [each for of in parts for each in of]

    def _at(self, unit: int, indices: Sequence[int]) -> Verb[list[Part[T]]]:
        attempt = partial(self._attempt, unit, indices)
        what = f"{self._what} at storage unit {unit}"
        return persist(attempt, what=what, timeout=self._left(), clock=self._verbs.clock)

    def _attempt(self, unit: int, indices: Sequence[int]) -> Verb[list[Part[T]]]:
        there = unit in self._verbs.units()
        if not there and (found := (yield from self._where(indices))).keys() != {unit}:
            return (yield from self._spread(found))
        seconds = self._left() if there else min(_AWAITED_S, self._left())
        try:
            return [(indices, (yield from self._send(unit, indices, seconds)))]
        except Elsewhere as moved:
            found = yield from self._where(indices)
            if found.keys() == {unit}:
                raise PeerLost(f"rows are on their way: {moved}", where=f"storage unit {unit}") from moved
        return (yield from self._spread(found))

    def _where(self, indices: Sequence[int]) -> Verb[dict[int, list[int]]]:
        """Ask the controller where rows lie; give their indices by unit."""
        request = AskWhere(shrink([self._numbers[index] for index in indices]))
        answer = yield from self._verbs.ask("queue.where", request, Whereabouts, timeout=self._left())
        units = parts_by(expand_equal(answer.units, len(indices)))
        return {unit: [indices[place] for place in places] for unit, places in units.items()}

    def _spread(self, found: dict[int, list[int]]) -> Verb[list[Part[T]]]:
        lost = found.pop(NOWHERE, None)
        parts = yield from self.all(list(found.items()))
        return [*parts, (lost, None)] if lost else parts

    def _left(self) -> float:
        return left_of(self._deadline, self._verbs.clock)
