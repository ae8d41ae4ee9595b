"""The rows of a simulated queue: samples, their groups, and parked claims.

Invariants: a row is open, held by one rollout, or done. Once a group is put, it is in the index if and only if it has
open rows. Claims are met in the order in which they were parked, first those that need no other weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncflow.flow.claims import whole_groups
from asyncflow.flow.instance import Claim, Purpose, Work
from asyncflow.flow.ready import ReadyIndex, VersionFilter
from asyncflow.flow.schedule import VersionWindow
from asyncflow.sim.agenda import Agenda

if TYPE_CHECKING:
    from asyncflow.sim.rollouts import SimulatedRollout


class SimulatedRow:
    """One sample.

    tokens: of its prompt; generated: tokens that another rollout has generated, under versions ``oldest`` to
    ``newest``; weighted: sum of the versions of its tokens; marked: number of tokens in that sum.
    """

    __slots__ = (
        "ends",
        "generated",
        "group",
        "marked",
        "newest",
        "oldest",
        "response_tokens",
        "sample",
        "started",
        "tokens",
        "weighted",
        "work",
    )  # fmt: skip

    def __init__(self, group: SimulatedGroup, sample: int, *, tokens: int, response_tokens: int) -> None:
        self.group, self.sample = group, sample
        self.tokens, self.response_tokens = tokens, response_tokens
        self.work = Work(self, group.purpose, group.window)
        self.started = self.ends = 0.0
        self.forget()

    @property
    def weight(self) -> int:
        """Tokens of prompt and response, at least 1."""
        return max(1, self.tokens + self.response_tokens)

    def forget(self) -> None:
        """Forget its generated tokens."""
        self.generated = self.marked = self.weighted = 0
        self.oldest = self.newest = -1

    def mark(self, tokens: int, version: int) -> None:
        """Record that the tokens up to ``tokens`` were generated under ``newest``, later ones under ``version``."""
        if tokens > self.marked:
            self.weighted += (tokens - self.marked) * self.newest
            self.marked = tokens
        self.newest = version
        if self.oldest < 0 or not tokens:
            self.oldest = version


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedGroup:
    """The samples of one prompt. left: number of samples that are not done."""

    serial: int
    step: int
    purpose: Purpose
    window: VersionWindow
    rows: list[SimulatedRow] = field(default_factory=list)
    open: list[SimulatedRow] = field(default_factory=list)
    left: int = 0


class RowPool:
    """The open rows of one partition, and the rollouts with parked claims."""

    def __init__(self, purpose: Purpose, agenda: Agenda) -> None:
        self.purpose = purpose
        self._agenda = agenda
        self._index: ReadyIndex[SimulatedGroup] = ReadyIndex()
        self._parked: dict[SimulatedRollout, tuple[Claim, VersionFilter, int]] = {}

    def put(self, group: SimulatedGroup) -> None:
        """Make the open rows of a group available."""
        self._index.add(group, window=group.window, order=(group.step,), weight=len(group.open))
        self._agenda.wake(self)

    def give_back(self, rows: list[SimulatedRow]) -> None:
        """Make rows available again after their rollout released them."""
        for row in rows:
            row.group.open.append(row)
        for group in dict.fromkeys(row.group for row in rows):
            group.open.sort(key=_sample)
            self.put(group)

    def parked(self, rollout: SimulatedRollout) -> Claim | None:
        """Return the parked claim of ``rollout``."""
        claim = self._parked.get(rollout)
        return None if claim is None else claim[0]

    def withdraw(self, rollout: SimulatedRollout) -> None:
        """Remove the parked claim of ``rollout``."""
        self._parked.pop(rollout, None)

    def claim(self, rollout: SimulatedRollout, claim: Claim, *, most: int) -> list[SimulatedRow]:
        """Return whole groups of at most ``most`` rows, at least one; park the claim if there are none."""
        versions = VersionFilter(claim.version, claim.accept)
        rows = self._take(versions, most, exact=True) or (
            self._take(versions, most, exact=False) if claim.accept else []
        )
        if not rows:
            self._parked[rollout] = (claim, versions, most)
        return rows

    def react(self) -> None:
        """Answer the claims for which rows are available."""
        for exact in (True, False):
            for rollout, (claim, versions, most) in list(self._parked.items()):
                if not len(self._index):
                    return
                if (exact or claim.accept) and (rows := self._take(versions, most, exact=exact)):
                    del self._parked[rollout]
                    rollout.granted(self.purpose, rows)

    def _take(self, versions: VersionFilter, most: int, *, exact: bool) -> list[SimulatedRow]:
        each = self._index.each(versions.suits if exact else versions.accepts)
        groups = whole_groups((group.open for group in each), most=most)
        for rows in groups:
            group = rows[0].group
            group.open = []
            self._index.discard(group)
        return [row for rows in groups for row in rows]


def _sample(row: SimulatedRow) -> int:
    return row.sample
