"""How a call reaches the units where rows lie, also when they moved since the caller was told.

A row is looked for where its holder was told that it lies, or where its id says. A unit that has it no more says so,
and one that is gone is not called: then the controller tells where the rows lie now.

Invariant: each row is answered for once, by the unit where it lies, or is named among those that lie nowhere; a unit
that is merely away is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from asyncflow.errors import Elsewhere, PeerLost
from asyncflow.queue.client.scatter import parts_by
from asyncflow.queue.client.verbs import Verb, left_of, persist, together
from asyncflow.queue.client.verbs_control import ControlVerbs
from asyncflow.queue.protocol.moving_calls import NOWHERE, AskWhere, Whereabouts
from asyncflow.queue.protocol.runs import expand_equal, shrink

_AWAITED_S = 5.0
"""How long a unit is called that takes nothing new, or is away, before the controller is asked again."""

T = TypeVar("T")
Part = tuple[list[int], T]
"""The indices of rows, and what came of them."""


def at_homes(
    verbs: ControlVerbs,
    numbers: Sequence[int],
    keys: Iterable[tuple[int, Hashable]],
    send: Callable[[int, list[int], float], Verb[T]],
    *,
    what: str,
    timeout: float,
) -> Verb[list[tuple[list[int], T | None]]]:
    """Have ``send(unit, indices, seconds)`` make one call for the rows of one key at one unit; give what came of each.

    keys: for each of ``numbers`` the unit where it was last known to lie, and what must be the same within one call.
    None came of rows that lie nowhere. Errors pass through, but those after which a call is made again.
    """
    deadline = verbs.clock() + timeout

    def part(unit: int, indices: list[int]) -> Verb[list[tuple[list[int], T | None]]]:
        def attempt() -> Verb[list[tuple[list[int], T | None]]]:
            there = unit in verbs.units()
            if not there and (found := (yield from where(indices))).keys() != {unit}:
                return (yield from spread(found))
            seconds = left_of(deadline, verbs.clock)
            try:
                return [(indices, (yield from send(unit, indices, seconds if there else min(_AWAITED_S, seconds))))]
            except Elsewhere as moved:
                found = yield from where(indices)
                if found.keys() == {unit}:
                    raise PeerLost(f"rows are on their way: {moved}", where=f"storage unit {unit}") from moved
            return (yield from spread(found))

        left = left_of(deadline, verbs.clock)
        return persist(attempt, what=f"{what} at storage unit {unit}", timeout=left, clock=verbs.clock)

    def where(indices: list[int]) -> Verb[dict[int, list[int]]]:
        request = AskWhere(shrink([numbers[index] for index in indices]))
        left = left_of(deadline, verbs.clock)
        answer = yield from verbs.ask("queue.where", request, Whereabouts, timeout=left)
        units = parts_by(expand_equal(answer.units, len(indices)))
        return {unit: [indices[place] for place in places] for unit, places in units.items()}

    def spread(found: dict[int, list[int]]) -> Verb[list[tuple[list[int], T | None]]]:
        lost = found.pop(NOWHERE, None)
        parts = yield from together(part(unit, indices) for unit, indices in found.items())
        return [each for of in parts for each in of] + ([(lost, None)] if lost else [])

    homes = parts_by(keys)
    parts = yield from together(part(unit, indices) for (unit, _), indices in homes.items())
    return parts[0] if len(parts) == 1 else [each for of in parts for each in of]
