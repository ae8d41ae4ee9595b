"""Which unit takes a client's next rows: of those that are there, the one that it gave the fewest.

Who begins asks the controller what each unit was given by all, and in which order of turns clients began: so many
clients that put a few rows each are spread as one that puts many. A unit that is new is as far as the least of the
others, and so gets its share from then on. What was tried and found no room counts as given: the next rows go on.

Invariant: the counts of two units that are there all the time, and take what comes, differ by no more than the largest
put; a unit that leaves gets nothing while it says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from asyncflow.errors import AsyncFlowError, PeerLost
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Member
from asyncflow.queue.client.verbs import Clock, Verb, once
from asyncflow.queue.protocol.calls import Nothing
from asyncflow.queue.protocol.moving_calls import Shares

LEAVING = "leaving"
"""In the directory's ``info`` of a unit: it takes nothing new."""

_ASK_S = 2.0
_AVOID_S = 10.0
"""How long a unit that says that it leaves is not asked again; its successor may be there then."""


class Taking:
    """Returns the indices of the units that take new rows, as the directory knows them."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._members: tuple[Member, ...] = ()
        self._units: list[int] = []

    def __call__(self) -> Sequence[int]:
        """Return them, in order."""
        members = self._membership.peers("storage")
        if members is not self._members:
            self._units = [member.index for member in members if not member.info.get(LEAVING)]
            self._members = members
        return self._units


class Placement:
    """The units of one client. units: gives the indices of those that are there."""

    def __init__(self, *, units: Callable[[], Sequence[int]], clock: Clock) -> None:
        self._units = units
        self._clock = clock
        self._given: dict[int, int] = {}
        self._avoided: dict[int, float] = {}
        self._turn = 0
        self._lock = threading.Lock()

    begun = False
    """Whether ``begin`` was done."""

    def begin(self) -> Verb[None]:
        """Ask the controller once how far the units are; a client that gets no answer begins from nothing."""
        if self.begun:
            return
        self.begun = True
        try:
            shares, _ = yield from once(None, "queue.shares", Nothing(), Shares, timeout=_ASK_S)
        except AsyncFlowError:
            return
        with self._lock:
            self._turn = shares.turn
            least = min(shares.given.values(), default=0)
            self._given = {unit: given - least for unit, given in shares.given.items()}

    def choose(self, rows: int, *, there: Sequence[int] = (), but: Collection[int] = ()) -> int:
        """Return the unit for ``rows`` more rows, which count as given to it; not one of ``but`` if there is another.

        there: the units that take rows, where the caller knows. Raises PeerLost where there is none.
        """
        units = there or self.there()
        if not units:
            raise PeerLost("no storage unit is there that takes rows", where="queue client")
        with self._lock:
            if self._given.keys() != set(units):
                least = min((self._given[unit] for unit in units if unit in self._given), default=0)
                self._given = {unit: self._given.get(unit, least) for unit in units}
            first = self._turn % len(units)
            in_turn = [*units[first:], *units[:first]]
            fresh = [unit for unit in in_turn if unit not in but] if but else in_turn
            unit = min(fresh or in_turn, key=self._given.__getitem__)
            self._given[unit] += rows
            return unit

    def avoid(self, unit: int) -> None:
        """Note that a unit takes nothing any more."""
        self._avoided[unit] = self._clock() + _AVOID_S

    def there(self) -> list[int]:
        """Return the units that take rows."""
        units = sorted(self._units())
        if not self._avoided:
            return units
        now = self._clock()
        self._avoided = {unit: until for unit, until in self._avoided.items() if until > now}
        return [unit for unit in units if unit not in self._avoided]
